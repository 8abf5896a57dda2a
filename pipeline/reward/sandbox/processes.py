"""The resources that processes use, read from `/proc`."""

import contextlib
import os

PAGE = os.sysconf("SC_PAGE_SIZE")


def _memory(pid: int) -> tuple[int, int]:
    """Return the bytes of resident memory, and the bytes of it that belong to files (mapped weights, libraries) or are
    shared."""
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
    """Count threads and bytes of resident memory of all processes below `pid`. Shared pages count for each process."""
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
