"""Idle and busy seconds of an engine: without and with admitted chunks."""

import time
from collections.abc import Callable


class Occupancy:
    """Measures, by `clock`, the seconds with at least one admitted chunk (busy) and with none (idle)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._since = clock, clock()
        self._chunks = 0
        self._idle = self._busy = 0.0

    def enter(self) -> None:
        """Record that a chunk was admitted."""
        self._count()
        self._chunks += 1

    def leave(self) -> None:
        """Record that a chunk is done or has failed."""
        self._count()
        self._chunks -= 1

    def take(self) -> tuple[float, float]:
        """Return (idle seconds, busy seconds) since the last call."""
        self._count()
        spent = self._idle, self._busy
        self._idle = self._busy = 0.0
        return spent

    def _count(self) -> None:
        now = self._clock()
        if self._chunks:
            self._busy += now - self._since
        else:
            self._idle += now - self._since
        self._since = now
