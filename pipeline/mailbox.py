"""Messages to one reader, kept until the reader says that it has them."""

import asyncio
import time
from typing import Any


class Mailbox:
    """Numbered messages.

    Args:
        first: number before the first message. Where a mailbox takes the place of one that was lost, it lies beyond
            all numbers of that one, so that a reader who asks for what follows the old ones misses none of the new.
    """

    PAUSE_S = 0.05

    def __init__(self, first: int = 0):
        self._count = self._confirmed = first
        self._messages: list[dict[str, Any]] = []

    def post(self, kind: str, **payload: Any) -> None:
        """Leave a message."""
        self._count += 1
        self._messages.append({"kind": kind, **payload})

    async def read(self, after: int, timeout: float) -> tuple[int, list[dict[str, Any]]]:
        """Messages past number `after`, and the number of the last one; waits up to `timeout` seconds for one.

        Messages up to `after` are confirmed thereby, and forgotten.
        """
        self._confirmed = max(self._confirmed, min(after, self._count))
        self._messages = self._messages[len(self._messages) - (self._count - self._confirmed) :]
        deadline = time.monotonic() + timeout
        while not self._messages and time.monotonic() < deadline:
            await asyncio.sleep(self.PAUSE_S)
        return self._count, list(self._messages)

    async def emptied(self, timeout: float) -> bool:
        """Wait until the reader has confirmed all messages that are there now; False when it takes longer."""
        wanted, deadline = self._count, time.monotonic() + timeout
        while self._confirmed < wanted:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(self.PAUSE_S)
        return True
