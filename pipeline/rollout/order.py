"""Chunks that may start together start in their order.

Answers of the policy store overtake each other, and rows leave in the order of their chunks: a first chunk that starts
last would hold back all others, and streamed gradients would have nothing to start with.
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
        """Await `answer`, then wait until all earlier waiting chunks are admitted; returns the result of `answer`.

        Earlier chunks are always admissible too, so this wait cannot deadlock.
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
