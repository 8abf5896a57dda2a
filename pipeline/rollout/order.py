"""Starts chunks in the order of their numbers if they are admitted at about the same time.

Replies of the policy store overtake each other, and rows leave an engine in the order of their chunks: a first chunk
that starts last would hold back all others, and streamed gradients would have nothing to start with.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Answer = TypeVar("Answer")


class InOrder:
    """The chunks of one engine that wait for admission; used from one event loop."""

    def __init__(self) -> None:
        self._asking: list[tuple[int, asyncio.Future[None]]] = []

    async def admitted(self, chunk: int, answer: Awaitable[Answer]) -> Answer:
        """Await the admission `answer` of a chunk, then wait until all earlier waiting chunks are admitted.

        Returns the result of `answer`. Earlier chunks are always admissible too, so the wait cannot deadlock.
        """
        own = chunk, asyncio.get_running_loop().create_future()
        self._asking.append(own)
        try:
            given = await answer
            before = [through for number, through in self._asking if number < chunk]
            if before:
                await asyncio.wait(before)
            return given
        finally:
            self._asking.remove(own)
            own[1].set_result(None)
