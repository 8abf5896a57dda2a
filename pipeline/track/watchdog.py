"""What a run waits for, told whenever nothing has moved for a minute."""

import time
from collections.abc import Callable

from pipeline.store.status import StoreStatus

QUIET_S = 60.0


def describe(status: StoreStatus) -> str:
    """The policy store's `status` in words."""
    waits = ", ".join(f"{count} in {phase}" for phase, count in status.waiting.items() if count) or "none"
    return (
        f"policy version {status.version} is out, store waits: {waits}, last heartbeat {status.alive_s:.0f} s "
        f"ago from {status.alive_by}"
    )


class Watchdog:
    """Says when to speak: after a minute without a movement, then after two, four, ... in all.

    Args:
        quiet_s: the first silence that is told, in seconds.
        clock: seconds that pass.
    """

    def __init__(self, quiet_s: float = QUIET_S, clock: Callable[[], float] = time.monotonic):
        self._quiet_s, self._clock = quiet_s, clock
        self.moved()

    def moved(self) -> None:
        """Something came."""
        self._moved_at, self._next_s = self._clock(), self._quiet_s

    def look(self, status: StoreStatus) -> str | None:
        """What to say, if it is time.

        Args:
            status: of the policy store; its own last heartbeat counts as a movement.
        """
        now = self._clock()
        self._moved_at = max(self._moved_at, now - status.alive_s)
        silent = now - self._moved_at
        if silent < self._quiet_s:
            self._next_s = self._quiet_s
        if silent < self._next_s:
            return None
        self._next_s = 2 * silent
        return f"nothing has moved for {silent:.0f} s: {describe(status)}"
