"""What the processes below one process use."""

import contextlib
import os

PAGE = os.sysconf("SC_PAGE_SIZE")


def usage(pid: int) -> tuple[int, int]:
    """Threads, and bytes of resident memory, of all processes below `pid`. Shared pages count for each process."""
    threads = memory = 0
    waiting = [pid]
    while waiting:
        process = waiting.pop()
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            tasks = os.listdir(f"/proc/{process}/task")
            for task in tasks:
                with open(f"/proc/{process}/task/{task}/children") as file:
                    waiting += [int(child) for child in file.read().split()]
            if process != pid:
                threads += len(tasks)
                with open(f"/proc/{process}/statm") as file:
                    memory += int(file.read().split()[1]) * PAGE
    return threads, memory
