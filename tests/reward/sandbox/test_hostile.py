"""Programs that mean harm to the machine: none runs past its limits, none stays behind."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox import runner
from pipeline.reward.sandbox.rule import compute_score
from pipeline.reward.sandbox.runner import run
from tests.reward.sandbox.attempts import SLACK_S, attempt

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

ENDLESS = {
    "loop": "while True: pass",
    "sleep": "import time; time.sleep(1000)",
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "stops itself by a thread's signal": "import signal; signal.raise_signal(signal.SIGSTOP)",
    "ignores signals": """
import signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True: pass
""",
    "closes its pipes": "import os\nos.closerange(0, 64)\nwhile True: pass",
    "regex": "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
    "power": "print(9 ** 9 ** 9 ** 9)",
    "waits for a child": "import os\nif os.fork() == 0:\n  while True: pass\nos.wait()",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_program_without_end_is_ended(name: str, limits: SandboxConfig) -> None:
    outcome = attempt(ENDLESS[name], replace(limits, timeout_s=1.0))
    refused = name == "power" and "MemoryError" in outcome.stderr
    refused |= name == "stops itself" and "PermissionError" in outcome.stderr and limits.isolation == "none"
    assert outcome.ended == "time" or refused


def test_cpu_time_has_a_limit_of_its_own(limits: SandboxConfig) -> None:
    config = replace(limits, cpu_s=1, timeout_s=60.0, total_timeout_s=60.0)
    outcome = run("import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "", config)
    assert (outcome.ended, outcome.failure) == ("exit", "ended by SIGKILL")


BOMBS = {
    "tree": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "chain": "import os\nwhile True:\n  if os.fork(): os._exit(0)",
    "sessions": """
import os
while True:
    try:
        if os.fork() == 0: os.setsid()
    except OSError: pass
""",
    "threads": """
import threading, time
while True:
    threading.Thread(target=time.sleep, args=(1000,)).start()
""",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_fork_bomb_is_bounded_and_leaves_nothing(name: str, limits: SandboxConfig) -> None:
    outcome = attempt(BOMBS[name], limits)
    # The chain's first process ends well; what it leaves behind is killed.
    assert outcome.failure or name == "chain"


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
    assert (outcome.ended, outcome.stdout) == ("exit", "started\n")  # that it is gone is checked after every test


def test_memory_of_one_process_is_limited(limits: SandboxConfig) -> None:
    outcome = attempt("x = bytearray(10 << 30)", limits)
    assert outcome.failure == "exit status 1: MemoryError"


def test_memory_of_all_processes_is_limited(limits: SandboxConfig) -> None:
    code = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(b"x") * (150 << 20)
        time.sleep(1000)
time.sleep(1000)
"""
    outcome = run(code, "", replace(limits, timeout_s=60.0, total_timeout_s=60.0))
    assert outcome.failure == "memory limit exceeded"


def test_memory_outside_of_any_address_space_is_refused(limits: SandboxConfig) -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.shmget(0, ctypes.c_size_t(1 << 20), 0o1600), libc.memfd_create(b"x", 0))
"""
    assert attempt(code, limits).stdout == "-1 -1\n"


OUTPUT = {
    "stdout": "while True: print('x' * 1000)",
    "stderr": "import sys\nwhile True: sys.stderr.write('x' * 1000)",
    "bytes": "import os\nwhile True: os.write(1, b'\\xff' * 65536)",
    "children": "import os\nfor _ in range(3): os.fork()\nwhile True: os.write(1, b'x' * 4096)",
}


@pytest.mark.parametrize("name", OUTPUT)
def test_output_has_a_limit(name: str, limits: SandboxConfig) -> None:
    outcome = attempt(OUTPUT[name], limits)
    assert outcome.failure == "output limit exceeded"
    assert max(len(outcome.stdout), len(outcome.stderr)) <= (limits.output_kb << 10) + 1


def test_a_file_has_a_limit(limits: SandboxConfig) -> None:
    outcome = attempt("with open('big', 'wb') as file:\n  while True: file.write(b'x' * 65536)", limits)
    assert outcome.returncode == 1 and "File too large" in outcome.failure


def test_the_work_folder_has_a_limit(walls: SandboxConfig) -> None:
    code = "for i in range(100):\n  with open(str(i), 'wb') as file: file.write(b'x' * (1 << 20))"
    assert "No space left on device" in attempt(code, walls).failure
    if walls.isolation == "namespaces":
        assert "No space left on device" in attempt("for i in range(10000): open(str(i), 'w')", walls).failure


HARMLESS_TRICKS = {
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
    "recursion in C": "x = []\nfor _ in range(10**6): x = [x]\nprint(repr(x))",
    "nesting": "eval('(' * 10**5 + ')' * 10**5)",
    "format width": "'{:>99999999999}'.format(1)",
    "format attributes": "print('{0.__class__.__init__.__globals__[secret]}'.format(1))",
    "percent": "print('%n%s' % 1)",
    "segfault": "import ctypes; ctypes.string_at(1)",
    "abort": "import os; os.abort()",
    "pickle": "import pickle; pickle.loads(b'cos\\nsystem\\n(S\\'touch CANARY\\'\\ntR.'); raise SystemExit(3)",
    "null byte": "x = '\0'",
    "surrogate": "x = '\ud800'",
    "encoding": "# coding: unknown-8bit\nraise SystemExit(2)",
}


@pytest.mark.parametrize("name", HARMLESS_TRICKS)
def test_a_trick_is_one_failed_program(name: str, walls: SandboxConfig, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    outcome = attempt(HARMLESS_TRICKS[name].replace("CANARY", str(canary)), walls)
    assert outcome.failure
    assert not canary.exists()


def test_all_tests_share_one_time(limits: SandboxConfig) -> None:
    start = time.monotonic()
    tests = {"inputs": ["x"] * 50, "outputs": ["x"] * 50}
    result = compute_score(
        "```python\nwhile True: pass\n```", tests, replace(limits, timeout_s=1.0, total_timeout_s=2.5)
    )
    assert time.monotonic() - start < 2.5 + SLACK_S
    assert (result["score"], result["total"]) == (0.0, 50) and "time limit" in result["reason"]


def test_a_sandbox_that_is_left_early_is_gone(limits: SandboxConfig) -> None:
    tests = [{"kind": "script", "stdin": ""}, {"kind": "script", "stdin": ""}]
    outcomes = runner.run_tests("print(1)", tests, limits)
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
