"""The watchdog: reports what a run waits for if nothing has happened for a minute."""

import time
from collections.abc import Callable

from pipeline.store.status import StoreStatus


class Watchdog:
    """Reports after `quiet_s` seconds without progress, then again each time the silence has doubled.

    Args:
        clock: returns the time in seconds.
        quiet_s: seconds without progress until the first report.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, quiet_s: float = 60.0):
        self._quiet_s, self._clock = quiet_s, clock
        self.moved()

    def moved(self) -> None:
        """Record that an event came."""
        self._moved_at, self._next_s = self._clock(), self._quiet_s

    def look(self, status: StoreStatus) -> str | None:
        """Return the report to show now, or None. The last heartbeat in `status` counts as progress."""
        now = self._clock()
        self._moved_at = max(self._moved_at, now - status.alive_s)
        silent = now - self._moved_at
        if silent < self._quiet_s:
            self._next_s = self._quiet_s
        if silent < self._next_s:
            return None
        self._next_s = 2 * silent
        return f"nothing has moved for {silent:.0f} s: {status.describe()}"
