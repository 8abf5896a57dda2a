"""Waits inside the policy store, with deadlines that count from the last heartbeat (report of progress) of the run."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from pipeline.store.errors import StoreTimeout


class Waits:
    """The waits inside one policy store.

    Args:
        check: called with the number of an attempt; raises `StaleAttempt` if the attempt has ended.
    """

    def __init__(self, check: Callable[[int], None]):
        self.changed = asyncio.Condition()
        """Notified after every change that may end a wait."""
        self.waiting: Counter[str] = Counter()
        """Number of waiting callers, by phase."""
        self.alive_by = "the store's own start"
        """Sender of the last heartbeat."""
        self._check, self._alive_at = check, time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat."""
        return time.monotonic() - self._alive_at

    def heartbeat(self, party: str) -> None:
        """Record that `party` has made progress, and wake all waits. The caller must hold `changed`."""
        self._alive_at = time.monotonic()
        self.alive_by = party
        self.changed.notify_all()

    async def until(
        self, attempt: int, ready: Callable[[], bool], timeout: float, phase: str, what: str | Callable[[], str]
    ) -> None:
        """Wait until `ready()` is true.

        Args:
            attempt: attempt of the caller.
            ready: condition.
            timeout: seconds since the later of the last heartbeat and the beginning of this wait.
            phase: name of the wait, in `waiting` and in the error.
            what: event that is awaited, for the error.

        Raises:
            StaleAttempt: the attempt has ended.
            StoreTimeout: no heartbeat came for `timeout` seconds.
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
