"""Reports the processes of a run that Ray's memory monitor has killed, when they are killed and at the end."""

import time
from collections import Counter
from collections.abc import Callable

from pipeline.upstream.ray_memory import GIB, Killed

EVERY_S = 5.0
"""Seconds between two looks at Ray's table."""
PARTIES = {"(Rollout)": "engines", "TrainWorker": "train workers"}
"""Kinds of processes of a run, by a part of the names of their tasks."""
OTHERS = "other processes"


class MemoryKills:
    """The processes that Ray's memory monitor has killed since the run began.

    Args:
        read: returns all processes that it has killed.
        clock: returns the time in seconds.
    """

    def __init__(self, read: Callable[[], list[Killed]], clock: Callable[[], float] = time.monotonic):
        self._read, self._clock = read, clock
        # This process may have run other runs before.
        self._seen = {one.worker for one in read()}
        self._counts = Counter[str]()
        self._next = clock() + EVERY_S

    def news(self) -> list[str]:
        """Return a sentence for each process that was killed since the last look at Ray's table."""
        if self._clock() < self._next:
            return []
        self._next = self._clock() + EVERY_S
        return self._look()

    def summary(self) -> dict[str, str]:
        """Return lines for the table at the end of a run, such as {"engines restarted": "1 (out of memory)"}."""
        self._look()
        return {f"{name} restarted": f"{count} (out of memory)" for name, count in self._counts.items()}

    def _look(self) -> list[str]:
        found = [one for one in self._read() if one.worker not in self._seen]
        self._seen |= {one.worker for one in found}
        self._counts.update(map(_kind, found))
        return list(map(_sentence, found))


def _kind(one: Killed) -> str:
    return next((name for part, name in PARTIES.items() if part in one.task), OTHERS)


def _sentence(one: Killed) -> str:
    kind = _kind(one)
    name = (one.task or "a process") if kind == OTHERS else f"the {kind[:-1]}"
    took = f", {one.used / GIB:.1f} GiB" if one.used else ""
    return f"out of memory: {name} (pid {one.pid}{took}) ended: {one.reason}; its work is repeated"
