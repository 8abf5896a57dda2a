"""Programs that fork: what a fork returns, or how it ends, is no answer of the program."""

import pytest

from pipeline.config.sandbox import SandboxConfig
from tests.reward.sandbox.programs import score

WAYS = {
    "exits": "if os.fork() == 0: sys.exit(0)",
    "returns": "if os.fork() == 0: return 99",
    "raises": "if os.fork() == 0: raise ValueError",
    "ends first": "process = os.fork()\n    if process == 0: return 99\n    os.waitpid(process, 0)",
    "is let go on": "os.fork()",
}
TESTS = {
    "call": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [2, 3]},
    "assert": {"assert_case": ["assert f(1) == 2"]},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", TESTS)
def test_a_fork_of_a_function_answers_nothing(way: str, kind: str, config: SandboxConfig) -> None:
    code = f"import os, sys\ndef f(x):\n    {WAYS[way]}\n    return x + 1\n"
    for _ in range(3):
        assert score(code, TESTS[kind], config)["score"] == 1.0


def test_a_program_that_forks_as_it_is_loaded_answers_once(config: SandboxConfig) -> None:
    code = "import os\nparent = os.fork()\ndef f(x):\n    return x + 1 if parent else 99\n"
    # The fork waits for calls next to its parent, and would take some of them.
    for tests in [*TESTS.values()] * 4:
        assert score(code, tests, config)["score"] == 1.0
