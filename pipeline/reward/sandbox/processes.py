"""The processes below one process: what they use, and their end."""

import contextlib
import os
import signal
import subprocess
import time

PAGE = os.sysconf("SC_PAGE_SIZE")


def below(pid: int) -> list[int]:
    """Ids of all processes that come from `pid`, parents before their children."""
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    children = [int(child) for child in file.read().split()]
                found += children
                waiting += children
    return found


def usage(pid: int) -> tuple[int, int]:
    """Threads, and bytes of resident memory, of all processes below `pid`. Shared pages count for each process."""
    threads = memory = 0
    for child in below(pid):
        with contextlib.suppress(OSError):
            threads += len(os.listdir(f"/proc/{child}/task"))
            with open(f"/proc/{child}/statm") as file:
                memory += int(file.read().split()[1]) * PAGE
    return threads, memory


def end(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Kills `process` and all below it; whether they are gone within `timeout_s`.

    A stopped process starts no new ones, and its children have process groups of their own, which die at once; so
    nothing gets away between the looks. Where a child is process 1 of a namespace, all in it die with it.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGSTOP)
    while (left := [pid for pid in below(process.pid) if _runs(pid)]) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                group = os.getpgid(pid)
                if group not in (os.getpgid(0), os.getpgid(process.pid)):
                    os.killpg(group, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    process.kill()
    try:
        process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return not left


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
