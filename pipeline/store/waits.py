"""Waits whose deadline counts from the last heartbeat of the run."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from pipeline.store.errors import StoreTimeout


class Waits:
    """The waits of one store.

    `check` raises if the attempt that it is given has ended.
    """

    def __init__(self, check: Callable[[int], None]):
        self.changed = asyncio.Condition()
        """Notified whenever something has happened that may end a wait."""
        self.waiting: Counter[str] = Counter()
        """Callers by the phase in which they wait."""
        self.alive_by = "the store's own start"
        self._check, self._alive_at = check, time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat."""
        return time.monotonic() - self._alive_at

    def heartbeat(self, party: str) -> None:
        """`party` has made progress; the caller holds `changed`."""
        self._alive_at = time.monotonic()
        self.alive_by = party
        self.changed.notify_all()

    async def until(
        self, attempt: int, ready: Callable[[], bool], timeout: float, phase: str, what: str | Callable[[], str]
    ) -> None:
        """Wait until `ready`. `phase` and `what` say in `waiting` and in the error what is waited for.

        Raises:
            StoreTimeout: there was no heartbeat for `timeout` seconds.
        """
        begun = time.monotonic()
        self.waiting[phase] += 1
        try:
            async with self.changed:
                while True:
                    self._check(attempt)
                    if ready():
                        return
                    left = max(begun, self._alive_at) + timeout - time.monotonic()
                    if left <= 0:
                        waited_for = what if isinstance(what, str) else what()
                        raise StoreTimeout(
                            f"{phase}: waited {time.monotonic() - begun:.0f} s for {waited_for}; the last heartbeat "
                            f"came {self.silent_s:.0f} s ago from {self.alive_by}"
                        )
                    try:
                        async with asyncio.timeout(left):
                            await self.changed.wait()
                    except TimeoutError:
                        continue
        finally:
            self.waiting[phase] -= 1
