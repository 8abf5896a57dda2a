"""Read the memory and the threads of processes from `/proc`."""

import contextlib
import os

PAGE = os.sysconf("SC_PAGE_SIZE")


def _memory(pid: int) -> tuple[int, int]:
    """Return (bytes of resident memory of a process, bytes of these that are mapped files or shared)."""
    with open(f"/proc/{pid}/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return resident * PAGE, shared * PAGE


def own_memory(pid: int) -> int:
    """Return the bytes of resident memory of one process without mapped files; 0 if /proc does not exist."""
    try:
        resident, shared = _memory(pid)
    except (OSError, ValueError):
        return 0
    return resident - shared


def usage(pid: int) -> tuple[int, int]:
    """Return (number of threads, bytes of resident memory) of all descendants of process `pid`.

    Shared pages count once for each process.
    """
    threads = memory = 0
    waiting = [pid]
    while waiting:
        process = waiting.pop()
        # A process may end at any moment.
        with contextlib.suppress(OSError):
            tasks = os.listdir(f"/proc/{process}/task")
            for task in tasks:
                with open(f"/proc/{process}/task/{task}/children") as file:
                    waiting += [int(child) for child in file.read().split()]
            if process != pid:
                threads += len(tasks)
                memory += _memory(process)[0]
    return threads, memory
