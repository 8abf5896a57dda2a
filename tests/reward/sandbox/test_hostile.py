"""Programs that mean harm to the machine: none runs past its limits, none stays behind."""

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox import runner
from tests.reward.sandbox.programs import SLACK_S, attempt, score

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

TIME, OUTPUT, ANY = "time limit exceeded", "output limit exceeded", "."
# The program, and a pattern of how it fails.
PROGRAMS = {
    # without end
    "loop": ("while True: pass", TIME),
    "sleep": ("import time; time.sleep(1000)", TIME),
    "stops itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", f"{TIME}|PermissionError"),
    "stops itself by a thread's signal": ("import signal; signal.raise_signal(signal.SIGSTOP)", TIME),
    "ignores signals": (
        "import signal\nfor number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(number, signal.SIG_IGN)\nwhile True: pass",
        TIME,
    ),
    "closes its pipes": ("import os\nos.closerange(0, 64)\nwhile True: pass", TIME),
    "regex": ("import re; re.match('(a+)+$', 'a' * 60 + 'b')", TIME),
    "power": ("print(9 ** 9 ** 9 ** 9)", f"{TIME}|MemoryError"),
    "waits for a child": ("import os\nif os.fork() == 0:\n  while True: pass\nos.wait()", TIME),
    # processes
    "tree": ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", ANY),
    "chain": ("import os\nwhile True:\n  if os.fork(): os._exit(0)", ""),  # its first process ends well
    "sessions": ("import os\nwhile True:\n  try:\n    if os.fork() == 0: os.setsid()\n  except OSError: pass", ANY),
    "threads": ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()", ANY),
    # memory
    "address space": ("x = bytearray(10 << 30)", "exit status 1: MemoryError"),
    # output
    "stdout": ("while True: print('x' * 1000)", OUTPUT),
    "stderr": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", OUTPUT),
    "bytes": ("import os\nwhile True: os.write(1, b'\\xff' * 65536)", OUTPUT),
    "children": ("import os\nfor _ in range(3): os.fork()\nwhile True: os.write(1, b'x' * 4096)", OUTPUT),
    "a file": ("with open('big', 'wb') as file:\n  while True: file.write(b'x' * 65536)", "File too large"),
    # tricks
    "recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()", ANY),
    "recursion in C": ("x = []\nfor _ in range(10**6): x = [x]\nprint(repr(x))", ANY),
    "nesting": ("eval('(' * 10**5 + ')' * 10**5)", ANY),
    "format width": ("'{:>99999999999}'.format(1)", ANY),
    "format attributes": ("print('{0.__class__.__init__.__globals__[secret]}'.format(1))", ANY),
    "percent": ("print('%n%s' % 1)", ANY),
    "segfault": ("import ctypes; ctypes.string_at(1)", ANY),
    "abort": ("import os; os.abort()", ANY),
    "null byte": ("x = '\0'", ANY),
    "surrogate": ("x = '\ud800'", ANY),
    "encoding": ("# coding: unknown-8bit\nraise SystemExit(2)", ANY),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_harmful_program_is_one_failed_program(name: str, limits: SandboxConfig) -> None:
    code, failure = PROGRAMS[name]
    # What never ends may as well be ended soon.
    outcome = attempt(code, replace(limits, timeout_s=0.4 if failure.startswith(TIME) else 1.0))
    assert re.search(failure, outcome.failure)
    assert max(len(outcome.stdout), len(outcome.stderr)) <= (limits.output_kb << 10) + 1


def test_an_unpickled_command_reaches_nothing(walls: SandboxConfig, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    code = f"import pickle; pickle.loads(b'cos\\nsystem\\n(S\\'touch {canary}\\'\\ntR.'); raise SystemExit(3)"
    assert attempt(code, walls).failure and not canary.exists()


def test_cpu_time_has_a_limit_of_its_own(limits: SandboxConfig) -> None:
    config = replace(limits, cpu_s=1, timeout_s=60.0, total_timeout_s=60.0)
    code = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert runner.run(code, "", config).failure == "ended by SIGKILL"


def test_processes_are_counted(walls: SandboxConfig) -> None:
    code = """
import os, time
made = 0
try:
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(1000)
        made += 1
except OSError: pass
time.sleep(1)  # for the look from outside, where the kernel does not count
print(made)
"""
    outcome = attempt(code, walls)
    # Whichever limit so many processes come to first.
    assert outcome.ended in ("processes", "memory", "time") or int(outcome.stdout) <= walls.max_processes + 3


def test_a_daemon_does_not_outlive_its_program(limits: SandboxConfig) -> None:
    code = """
import os, time
if os.fork() == 0:
    try: os.setsid()
    except OSError: pass
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        while True: time.sleep(0.01)
    os._exit(0)
print("started")
"""
    outcome = attempt(code, limits)
    assert (outcome.ended, outcome.stdout) == ("exit", "started\n")  # that it has ended is checked after every test


def test_memory_of_all_processes_is_limited(limits: SandboxConfig) -> None:
    code = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(b"x") * (150 << 20)
        time.sleep(1000)
time.sleep(1000)
"""
    outcome = runner.run(code, "", replace(limits, timeout_s=60.0, total_timeout_s=60.0))
    assert outcome.failure == "memory limit exceeded"


@pytest.mark.parametrize(
    "files", ["range(100):\n  open(str(i), 'wb').write(b'x' * (1 << 20))", "range(10000): open(str(i), 'w')"]
)
def test_the_work_folder_has_a_limit(files: str, walls: SandboxConfig) -> None:
    assert "No space left on device" in attempt(f"for i in {files}", walls).failure


def test_all_tests_share_one_time(limits: SandboxConfig) -> None:
    tests = {"inputs": ["x"] * 50, "outputs": ["x"] * 50}
    result = score("while True: pass", tests, replace(limits, timeout_s=0.5, total_timeout_s=1.2))
    assert (result["score"], result["total"]) == (0.0, 50) and "time limit" in result["reason"]


def test_a_sandbox_that_is_left_early_is_gone(limits: SandboxConfig) -> None:
    outcomes = runner.run_tests("print(1)", [{"kind": "script", "stdin": ""}] * 2, limits)
    assert next(outcomes).stdout == "1\n"
    outcomes.close()


def test_a_sandbox_ends_with_its_worker(limits: SandboxConfig, tmp_path: Path) -> None:
    code = f"""
from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox.runner import run
config = SandboxConfig(isolation={limits.isolation!r}, timeout_s=600.0, total_timeout_s=600.0)
run("import os; os.fork()\\nwhile True: pass", "", config)
"""
    folder = {**os.environ, "TMPDIR": str(tmp_path)}
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3], env=folder)
    try:
        process, deadline = psutil.Process(worker.pid), time.monotonic() + SLACK_S
        found: list[psutil.Process] = []
        while sum("inside.driver" in " ".join(child.cmdline()) for child in found) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            found = [child for child in process.children(recursive=True) if child.is_running()]
    finally:
        worker.kill()
        worker.wait(SLACK_S)
    assert not psutil.wait_procs(found, timeout=SLACK_S)[1]
    assert not list(tmp_path.iterdir())
