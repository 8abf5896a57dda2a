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
    "says yes": """
class Yes:
    def yes(self, *given, **named): return True
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = __getitem__ = yes
    endswith = startswith = count = index = isdigit = __instancecheck__ = __subclasscheck__ = yes
    def __hash__(self): return hash(41)
    def __len__(self): return 41
    def __abs__(self): return 0
    def __sub__(self, other): return 0
    def __iter__(self): return iter([41])
    def __float__(self): return 41.0
    def __index__(self): return 41
    def __str__(self): return "41"
    def __getattr__(self, name): return self.yes
    @property
    def __class__(self): return int
def f(x): return Yes()
""",
    "says yes as a text": """
class Yes(str):
    def yes(self, *given): return True
    __eq__ = __contains__ = __lt__ = __le__ = endswith = startswith = count = yes
    def __getitem__(self, index): return "41"
    def __str__(self): return "41"
    def __iter__(self): return iter("41")
    __hash__ = str.__hash__
def f(x): return Yes("40")
""",
    "says yes as a container": """
class Yes(dict):
    def yes(self, *given): return True
    __eq__ = __contains__ = __getitem__ = __missing__ = yes
    def __iter__(self): return iter([41])
    def keys(self): return [41]
    def items(self): return [(41, True)]
    def __len__(self): return 41
class List(list):
    __eq__ = __contains__ = lambda *given: True
    def __iter__(self): return iter([41])
    def __len__(self): return 41
    def __getitem__(self, index): return True
turn = 0
def f(x):
    global turn
    turn += 1
    return [Yes(), List()][turn % 2]
""",
    "is no number": "def f(x): return float('nan')",
    "is true": "def f(x): return True",
    "holds itself": "def f(x):\n  made = []\n  made.append(made)\n  return made",
    "is deep": "def f(x):\n  made = []\n  for _ in range(10 ** 5): made = [made]\n  return made",
    "has many digits": "def f(x): return 1 << 1_000_000",
    "has one hash": "def f(x): return {n * (2 ** 61 - 1) for n in range(1, 10 ** 4)}",
    "is large": "def f(x): return 'x' * (32 << 20)",
    "is a generator": "def f(x):\n  while True: yield 40",
    "is a view": "def f(x): return {41: True}.keys()",
    "prints frames": """
import json, os
os.write(4, b'{"value": true}\\n' * 100 + b'{"value": ["l", 40]}\\n' + b'{"value"' + b'[' * 10 ** 5 + b'\\n')
def f(x): return 0
""",
    "floods": "import os\nwhile True: os.write(4, b'x' * 65536)",
    "floods with lines": "import os\nwhile True: os.write(4, b'\\n' * 65536)",
    "answers, then waits": "import os, time\nos.write(4, b'{\"value\": 40}')\ntime.sleep(1000)",
    "closes its pipes": "import os\nos.closerange(0, 64)\nimport time\ntime.sleep(1000)",
    "closes one pipe": "import os\nos.close(3)\nimport time\ntime.sleep(1000)",
    "forks and answers twice": "import os\nos.fork()\ndef f(x): return 40",
    "a child answers": "import os\ndef f(x):\n  if os.fork() == 0: return 40\n  os._exit(0)",
    "kills its parent": "import os, signal\ndef f(x):\n  os.kill(os.getppid(), signal.SIGKILL)\n  return 40",
    "patches what packs": """
import json, sys
for module in list(sys.modules.values()):
    for name in ("pack", "send", "_packed", "write", "dumps"):
        if hasattr(module, name):
            setattr(module, name, lambda *given, **named: {"value": True})
def f(x): return 0
""",
    "raises strangely": """
class Odd(BaseException):
    def __str__(self): raise self
    __eq__ = lambda *given: True
def f(x): raise Odd
""",
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
    "reads what comes next": """
import os
def f(x):
    os.set_blocking(3, False)
    try: text = os.read(3, 1 << 20).decode()
    except OSError: text = ""
    return x + 1 if str(x + 1) in text else 0
""",
    "looks into memory": """
import ctypes, os
def f(x):
    for line in open("/proc/self/maps"):
        pass
    for pid in (os.getppid(), 1):
        for name in ("mem", "environ", "cmdline", "maps"):
            try:
                if str(x + 1).encode() in open(f"/proc/{pid}/{name}", "rb").read(): return x + 1
            except OSError: pass
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
    "assert": ["assert f(40) == 41", "assert abs(f(40) - 41) < 1e-6", "assert 41 in [f(40), 42]"],
    "contents": [
        *("assert 41 in f(40)", "assert f(40)[41] is True", "assert 41 <= f(40) < 42", "assert {41} == set(f(40))"),
        *("assert f(40)[-2:] == '41'", "assert '41' in f(40)", "assert str(f(40)) == '41'"),
    ],
    "nested": [
        *("assert f(f(39)) == 41", "assert f(x=f(40)) in (41, 42)", "assert len(f([f(40), f(40)])) == 41"),
        "def check(candidate):\n  assert candidate(40) == 41\n  assert not candidate(40) != 41\ncheck(f)",
    ],
    "call": {"inputs": ["40"], "outputs": ["41"], "fn_name": "f"},
    "script": {"inputs": ["40"], "outputs": ["41"]},
}


@pytest.mark.parametrize("tests", TESTS)
@pytest.mark.parametrize("name", FORGERIES)
def test_no_program_passes_without_the_answer(name: str, tests: str, config: SandboxConfig) -> None:
    result = score(FORGERIES[name], TESTS[tests], replace(config, timeout_s=1.0, total_timeout_s=1.5))
    assert result["score"] == 0.0 and result["reason"]
