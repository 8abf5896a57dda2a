"""Programs that reach for what lies outside of the sandbox: other processes, files, sockets; and what they leave."""

import ctypes
import os
import socket
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox.inside import limits as inner
from tests.reward.sandbox.programs import SLACK_S, attempt, score

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]


def test_no_socket_is_reached(limits: SandboxConfig) -> None:
    name = f"sandbox-test-{os.getpid()}"
    targets = [f"/tmp/{name}", f"\0{name}"]
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening: list[socket.socket] = [server]
        for target in targets:
            local = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            local.bind(target)
            listening.append(local)
        stack.callback(os.unlink, targets[0])
        code = f"""
import asyncio, socket
made = []
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK):
    for make in (lambda: socket.socketpair(socket.AF_UNIX, kind)[0], lambda: socket.socket(socket.AF_UNIX, kind)):
        try: made.append(make())
        except OSError: pass
def reach(action, *arguments):
    try: print("reached", action(*arguments))
    except OSError: pass
reach(socket.create_connection, {server.getsockname()!r})
for one in made:
    for target in {targets!r}:
        reach(one.connect, target)
        reach(one.sendto, b"x", target)
        reach(one.sendmsg, [b"x"], [], 0, target)
asyncio.run(asyncio.sleep(0))  # which needs a pair of its own
print(len(made))
"""
        outcome = attempt(code, limits)
        assert (outcome.stdout, outcome.failure) == ("1\n", "")
        for one in listening:
            one.settimeout(0.05)
            with pytest.raises(TimeoutError):
                one.accept() if one is server else one.recv(1)


def test_files_outside_are_neither_seen_nor_written(walls: SandboxConfig, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("canary")
    code = f"""
import os, sys
for action in (
    lambda: open({str(secret)!r}).read(),
    lambda: open({str(secret)!r}, "w"),
    lambda: os.listdir({str(Path.home())!r} + "/.ssh"),
    lambda: os.listdir({str(Path(__file__).parent)!r}),
    lambda: open("/proc/1/environ").read(),
    lambda: open("/proc/{os.getpid()}/environ").read(),
    lambda: os.listdir("/proc"),
    lambda: os.listdir("/sys"),
    lambda: open("/new", "w"),
    lambda: open("/usr/new", "w"),
    lambda: open("/sandbox/inside/driver.py", "a"),
    lambda: open(os.__file__, "a"),
    lambda: os.chmod(os.__file__, 0o777),
    lambda: os.mkdir("/dev/new"),
    lambda: os.mknod("/tmp/disk", 0o60600, os.makedev(8, 0)),
    lambda: os.chroot("/tmp"),
):
    try:
        print("done", action())
    except OSError as error:
        print(type(error).__name__)
"""
    outcome = attempt(code, walls)
    assert outcome.returncode == 0 and len(outcome.stdout.splitlines()) == 16
    assert "done" not in outcome.stdout and "canary" not in outcome.stdout
    assert secret.read_text() == "canary"


SIGNALS = {
    "to processes": f"""
import os, signal
for pid in ({os.getpid()}, os.getppid(), 1, -1):
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM):
        try: os.kill(pid, number)
        except OSError: pass
""",
    "by a file": """
import fcntl, os, signal, struct, time
reading, writing = os.pipe()
parent = os.getppid()
for command, owner in ((8, parent), (8, -os.getpgid(parent)), (15, struct.pack("ii", 1, parent))):
    try:
        fcntl.fcntl(reading, command, owner)
        fcntl.fcntl(reading, 10, signal.SIGKILL)
        fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(writing, b"x")
    except OSError: pass
time.sleep(0.1)
""",
}


@pytest.mark.parametrize("name", SIGNALS)
def test_no_signal_reaches_other_processes(name: str, limits: SandboxConfig) -> None:
    """The second test shows that the supervisor is alive, too."""
    code = SIGNALS[name] + "print('survived')"
    tests = {"inputs": ["", ""], "outputs": ["survived", "survived"]}
    assert score(code, tests, replace(limits, total_timeout_s=60.0))["passed"] == 2


def test_the_memory_of_other_processes_is_closed(limits: SandboxConfig) -> None:
    memory = ctypes.create_string_buffer(b"canary")
    code = f"""
for pid in ({os.getpid()}, {os.getppid()}):
    for name in ("mem", "environ", "maps"):
        try:
            with open(f"/proc/{{pid}}/{{name}}", "r+b" if name == "mem" else "rb", buffering=0) as file:
                if name == "mem":
                    file.seek({ctypes.addressof(memory)})
                    file.write(b"broken")
                print(name, file.read(10))
        except OSError: pass
print("end")
"""
    assert attempt(code, limits).stdout == "end\n"
    assert memory.value == b"canary"


def test_the_supervisor_cannot_be_looked_into(limits: SandboxConfig) -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
limit = (ctypes.c_ulong * 2)(1, 1)
for pid in (os.getppid(), 1):
    print(libc.ptrace(16, pid, 0, 0), libc.prlimit(pid, 0, ctypes.byref(limit), None))
    part = (ctypes.c_ulong * 2)(ctypes.addressof(limit), 8)
    print(libc.process_vm_readv(pid, ctypes.byref(part), 1, ctypes.byref(part), 1, 0))
    print(libc.syscall(434, pid, 0) >= 0 and libc.syscall(438, libc.syscall(434, pid, 0), 1, 0))
"""
    numbers = attempt(code, limits).stdout.split()
    assert numbers and set(numbers) <= {"-1", "False"}


PRINTED = {
    "the environment is empty": (
        "import os\nprint(*sorted(os.environ))\n"
        "try: print(b'canary' in open('/proc/self/environ', 'rb').read())\nexcept OSError: print(False)",
        "LANG OMP_NUM_THREADS OPENBLAS_NUM_THREADS PATH\nFalse\n",
    ),
    "no new namespace, no mount": (
        "print(libc.unshare(0x10000000), libc.unshare(0x20000), libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0))\n"
        "print(libc.syscall(56, 0x10000011, 0, 0, 0, 0))",
        "-1 -1 -1\n-1\n",
    ),
    "no memory outside of any address space": (
        "print(libc.shmget(0, ctypes.c_size_t(1 << 20), 0o1600), libc.memfd_create(b'x', 0))",
        "-1 -1\n",
    ),
}


@pytest.mark.parametrize("name", PRINTED)
def test_what_a_program_is_given(name: str, limits: SandboxConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "canary")
    code, printed = PRINTED[name]
    assert attempt(f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n{code}", limits).stdout == printed


LEFTOVERS = {
    "nested": "import os\nfor _ in range(2000):\n  os.mkdir('d')\n  os.chdir('d')",
    "unreadable": "import os\nos.mkdir('a', 0)\nos.makedirs('b/c')\nos.umask(0o777)\nos.mkdir('b/d')\nopen('b/e', 'w')",
    "chmod": "import os\nos.makedirs('a/b')\nfor name in ('a/b', 'a', '.', '..', 'OUTSIDE'):\n  os.chmod(name, 0)",
    "moved": "import os\nos.rename(os.getcwd(), 'OUTSIDE/moved')",
    "elsewhere": "import os\nos.makedirs('OUTSIDE/new')",
    "a file elsewhere": "open('OUTSIDE/new', 'w').write('x')",
    "a link": "import os\nos.symlink('OUTSIDE', 'link')\nopen('link/new', 'w')",
    "a named semaphore": "import multiprocessing\nmultiprocessing.Lock()\nopen('/dev/shm/NAME', 'w')",
    "strange names": "import os\nopen(b'\\xff\\n', 'w')\nos.mkfifo('pipe')\nos.mkdir(' ')\nos.symlink('/', 'root')",
}


@pytest.mark.parametrize("name", LEFTOVERS)
def test_nothing_is_left_on_the_disk(
    name: str, limits: SandboxConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if inner.libc.syscall(444, None, 0, 1) < 3:
        pytest.skip("needs Landlock with truncation (Linux 6.2)")
    outside, work = tmp_path / "outside", tmp_path / "work"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    work.mkdir()
    token = f"sandbox-test-{os.getpid()}"
    monkeypatch.setattr(tempfile, "tempdir", str(work))
    code = LEFTOVERS[name].replace("OUTSIDE", str(outside)).replace("NAME", token)
    score(code, {"inputs": ["", ""], "outputs": ["", ""]}, limits)
    deadline = time.monotonic() + SLACK_S
    while list(work.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)  # a large folder may be removed after the score is known
    assert not list(work.iterdir())
    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("kept", "kept")]
    assert not Path("/dev/shm", token).exists()
