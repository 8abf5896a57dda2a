"""Programs that claim to have passed: none is believed."""

from dataclasses import replace
from typing import Any

import pytest

from pipeline.config.sandbox import SandboxConfig
from tests.reward.sandbox.programs import score

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

FORGERIES = {
    "ends at once": "import os; os._exit(0)",
    "exits": "import sys; sys.exit(0)",
    "ends in the call": "import os\ndef f(x): os._exit(0)",
    "exits in the call": "import sys\ndef f(x): sys.exit(0)",
    "equals everything": """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def f(x): return Equal()
""",
    "equals everything, no number": "class Any:\n  def __eq__(self, other): return True\ndef f(x): return Any()",
    "replaces builtins": """
import builtins
builtins.abs = abs = lambda x: 0
builtins.all = builtins.isinstance = lambda *x: True
class AssertionError(Exception): pass
builtins.AssertionError = KeyError
def f(x): return 0
""",
    "prints verdicts": """
import json, os
text = json.dumps({"passed": True, "reason": "", "value": 1}).encode()
for fd in range(64):
    try: os.write(fd, len(text).to_bytes(4, "little") + text)
    except OSError: pass
def f(x): return 0
""",
    "prints verdicts without length": """
import os
for fd in range(64):
    try: os.write(fd, b'{"passed": true, "reason": ""}')
    except OSError: pass
os._exit(0)
""",
    "answers for itself": """
import os
def message(text): return len(text).to_bytes(4, "little") + text
os.write(4, message(b'{"names": ["f", "abs"]}') + message(b'{"value": true}') * 20)
while True: pass
""",
    "raises what ends a loop": "def f(x): raise StopIteration",
    "raises a failed assert": "def f(x): raise AssertionError",
    "patches the driver": """
import sys
for module in list(sys.modules.values()):
    if "inside" in getattr(module, "__name__", ""):
        module.pack = module._failure = lambda *x: True
def f(x): return 0
""",
    "looks for the tests": r"""
import gc, re, sys
def f(x):
    frame, seen = sys._getframe(), gc.get_objects()
    while frame:
        seen += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    for value in seen:
        if isinstance(value, (str, list, tuple, dict)):
            if re.search(r"f\(40\) ==|\[41\]|'[4]1'", str(value)[:10000]): return x + 1
    return 0
""",
    "looks through open files": """
import os
def f(x):
    for fd in range(64):
        try:
            if str(x + 1).encode() in os.pread(fd, 1 << 20, 0): return x + 1
        except OSError: pass
    return 0
""",
}
TESTS: dict[str, Any] = {
    "assert": ["assert f(40) == 41", "assert abs(f(40) - 41) < 1e-6", "assert all(map(lambda x: f(x) == x + 1, [40]))"],
    "call": {"inputs": ["40"], "outputs": ["41"], "fn_name": "f"},
    "script": {"inputs": ["40"], "outputs": ["41"]},
}


@pytest.mark.parametrize("tests", TESTS)
@pytest.mark.parametrize("name", FORGERIES)
def test_no_program_passes_without_the_answer(name: str, tests: str, config: SandboxConfig) -> None:
    result = score(FORGERIES[name], TESTS[tests], replace(config, timeout_s=1.0, total_timeout_s=3.0))
    assert result["score"] == 0.0 and result["reason"]
