"""Scores of programs by their tests."""

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest

from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox import answer, rule, runner
from pipeline.reward.sandbox.outcome import ProgramRun
from pipeline.reward.sandbox.rule import compute_score
from tests.reward.sandbox.programs import score

DOUBLE = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2\n", "4\n", "6\n"]}


def test_a_right_program(config: SandboxConfig) -> None:
    result = score("print(2 * int(input()))\nexit()", DOUBLE, config)
    assert result == {"score": 1.0, "acc": 1, "format": 1, "passed": 3, "total": 3, "reason": ""}


def test_the_share_of_tests_passed_or_all(config: SandboxConfig) -> None:
    wrong_once = "x = int(input())\nprint(2 * x if x != 2 else 5)"
    result = score(wrong_once, DOUBLE, config)
    assert (result["score"], result["passed"], result["reason"]) == (2 / 3, 2, "test 2: wrong answer")
    result = score(wrong_once, DOUBLE, replace(config, score="all"))
    assert (result["score"], result["passed"], result["total"], result["acc"]) == (0.0, 1, 3, 0)


def test_a_test_begins_with_an_empty_folder(config: SandboxConfig) -> None:
    code = "import os\nprint(sorted(os.listdir('.')))\nos.mkdir('sub')\nopen('sub/file', 'w').write('x')"
    tests = {"inputs": ["", ""], "outputs": ["['solution.py']"] * 2}
    assert score(code, tests, config)["score"] == 1.0


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def f(", "SyntaxError"),
        ("raise ValueError('no')", "ValueError: no"),
        ("import os; os.kill(os.getpid(), 15)", "SIGTERM"),
        ("import pipeline", "ModuleNotFoundError"),
        ("print(1, end='')\nexit(3)", "exit status 3"),
    ],
)
def test_what_a_program_does_wrong_is_a_score(code: str, reason: str, config: SandboxConfig) -> None:
    result = score(code, {"inputs": ["1"], "outputs": ["1"]}, config)
    assert result["score"] == 0.0 and result["format"] == 1
    assert result["reason"].startswith("test 1: ") and reason in result["reason"]


def test_packages_can_be_had(config: SandboxConfig) -> None:
    pytest.importorskip("numpy")
    tests = {"inputs": [""], "outputs": ["[0 1 2]"]}
    code = "import numpy\nprint(numpy.arange(3))"
    assert score(code, tests, replace(config, packages=True))["score"] == 1.0
    assert "ModuleNotFoundError" in score(code, tests, config)["reason"]


@pytest.mark.parametrize("response", ["", "print(1)", "```cpp\nint main() {}\n```", "```python\n \n```"])
def test_a_response_without_a_program_runs_nothing(response: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run_tests", None)
    result = compute_score(response, DOUBLE, SandboxConfig())
    assert (result["score"], result["format"], result["total"]) == (0.0, 0, 3)
    assert result["reason"] == "no code in the response"


def test_a_very_long_program_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run_tests", None)
    result = score("#" * (answer.MAX_CODE + 1), DOUBLE, SandboxConfig())
    assert result["score"] == 0.0 and "more than 100000" in result["reason"]


def test_what_is_wrong_with_the_data_is_an_error_even_without_a_program() -> None:
    with pytest.raises(ValueError, match="ground_truth of a code row"):
        compute_score("", {"inputs": []}, SandboxConfig())


def test_a_failing_sandbox_is_an_error(monkeypatch: pytest.MonkeyPatch, config: SandboxConfig) -> None:
    monkeypatch.setattr(runner.isolation, "interpreter", lambda: "/no/such/python")
    with pytest.raises(runner.SandboxError, match="failed: .*no/such/python"):
        score("print(1)", DOUBLE, replace(config, isolation=runner.resolve(config)))


def test_tests_after_the_last_outcome_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcomes(*_: Any) -> Generator[ProgramRun, None, None]:
        yield ProgramRun("exit", 0, "2\n")

    monkeypatch.setattr(rule.runner, "run_tests", outcomes)
    result = score("x", DOUBLE, SandboxConfig())
    assert (result["passed"], result["acc"]) == (1, 0)
    assert result["reason"] == "test 2: time limit of all tests exceeded"


CALLS = [
    "assert Solution().twoSum([1, 2], 9) == [1, 9]",
    "def check(candidate):\n  assert candidate(nums=[2], target=3) == [0, 3]\ncheck(Solution().twoSum)",
    "assert area([Point(1, 2), Point(x=3, y=4)]) == 14 and area([]) == 0",
    "assert double(double(3)) == 12 and double(x=[1]) == [1, 1]",
    "assert double('a' * 100_000) == 'a' * 200_000",
    "assert double(3) == 6 or endless()",
    "assert double(3) == 6 or leave()",
    "assert math.isclose(third(1), 0.333333, abs_tol=1e-5)",
]
PROGRAM = """
import os
class Point:
    def __init__(self, x, y): self.x, self.y = x, y
class Solution:
    def twoSum(self, nums, target): return [nums.index(2), target]
def area(points): return sum(point.x * point.y for point in points)
def double(x): return x + x
def third(x): return x / 3
def endless():
    while True: pass
def leave(): os._exit(0)
if __name__ == "__main__": raise ValueError
"""


def test_asserts_are_passed_by_a_right_program(config: SandboxConfig) -> None:
    result = score(PROGRAM, CALLS, replace(config, timeout_s=3.0))
    assert (result["passed"], result["reason"]) == (len(CALLS), "")
    result = score(PROGRAM.replace("x + x", "x * 3"), CALLS, replace(config, timeout_s=3.0))
    assert (result["passed"], result["acc"]) == (4, 0) and result["reason"] == "test 4: assertion failed"


@pytest.mark.parametrize("program", ["def f(", "raise ValueError", "import os; os._exit(0)", "import sys; sys.exit(0)"])
def test_a_program_that_does_not_load_passes_no_assert(program: str, config: SandboxConfig) -> None:
    result = score(program, ["assert f(1) != 2", "assert not f(1)"], config)
    assert result["score"] == 0.0 and result["reason"]


def test_an_assert_that_cannot_be_judged_is_an_error_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run_tests", None)
    with pytest.raises(ValueError, match="cannot be judged: `isinstance`"):
        score("def f(x): return x", ["assert f(1) == 1", "assert isinstance(f(1), int)"], SandboxConfig())


RESULTS: dict[str, tuple[str, Any, float]] = {
    "a large list": ("list(range(100_000))", list(range(100_000)), 1.0),
    "a dict of lists": ("{i: [i] * 100 for i in range(500)}", {str(i): [i] * 100 for i in range(500)}, 1.0),
    "a large list that is wrong": ("list(range(100_001))", list(range(100_000)), 0.0),
    "a list where a number is expected": ("list(range(100_000))", 3, 0.0),
    "more than any result may have": ("'x' * (20 << 20)", 3, 0.0),
    "many digits": ("10 ** 500_000", 3, 0.0),
    "many digits as a key": ("{10 ** 500_000: 1}", {"a": 1}, 0.0),
    "deep": ("eval('[' * 90 + ']' * 90)", 3, 0.0),
    "endless": ("(lambda x: x.append(x) or x)([])", 3, 0.0),
    "half a character": ("'\\ud800'", 3, 0.0),
    "half a character in an error": ("int('\\ud800')", 3, 0.0),
    "no data": ("object()", 3, 0.0),
    "a subclass": ("type('Yes', (int,), {'__eq__': lambda *given: True, '__hash__': int.__hash__})()", 3, 0.0),
    "one hash": ("{n * (2 ** 61 - 1) for n in range(1, 1000)}", 3, 0.0),
    "digits by hand": ("__import__('os').write(4, b'{\"value\": ' + b'1' * 500_000 + b'}')", 3, 0.0),
    "depth by hand": ("__import__('os').write(4, b'[' * 100_000)", 3, 0.0),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_of_any_size_are_right_or_wrong(name: str, config: SandboxConfig) -> None:
    source, expected, points = RESULTS[name]
    tests = {"fn_name": "f", "inputs": [[]], "outputs": [expected]}
    assert score(f"def f(): return {source}", tests, replace(config, output_kb=64))["score"] == points
