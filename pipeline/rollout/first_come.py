"""Groups in the order in which they are complete (`stream.order=first_come`).

The chunks of an engine share its batch, and a chunk that waits for one long response holds up all that is complete
behind it. Here a group that is complete changes places with one that still runs in an earlier chunk: the first chunk
is done as soon as the engine has completed as many groups as it gives, whichever they are, and the long response goes
on in a later one. Two things stay as they are:

- **The bound.** A group changes into a chunk of a later iteration only if its rows are no older than
  `algorithm.max_staleness` there, unless `algorithm.on_stale` has older ones corrected. The other one comes to be
  younger by it.
- **The account.** Chunks keep their size, and every prompt is in one chunk at any time. The policy store is told what
  is in which chunk before one with a foreign group is handed on: a chunk that another engine has to generate again is
  generated as it was, and a run that is resumed goes on with the prompts that are not trained.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from pipeline.rollout.engine import EngineLoop
from pipeline.rollout.group import Group, Requests, begin, prompts_of

Tell = Callable[[dict[int, pa.Table]], Awaitable[None]]
"""Takes the prompts of chunks by their numbers."""


@dataclass(eq=False)
class _Chunk:
    number: int
    iteration: int
    table: pa.Table
    groups: list[Group]
    complete: asyncio.Future
    untold: bool = False
    """Whether it has changed since the store was told of it."""
    gained: int = 0
    """Groups of later chunks that it has in the place of its own."""

    def prompts(self) -> pa.Table:
        return prompts_of(self.groups, self.table)


class FirstCome:
    """The chunks of one engine; used from one event loop.

    Args:
        max_staleness: how many versions old a row may be when it is trained on; None where an older one is corrected.
        engine: runs the requests.
        tell: is told before a chunk is handed on that holds others than its own groups.
    """

    def __init__(self, max_staleness: int | None, engine: EngineLoop, tell: Tell):
        self._bound, self._engine, self._tell = max_staleness, engine, tell
        self._open: dict[int, _Chunk] = {}
        # What is told later must be heard later.
        self._telling = asyncio.Lock()
        self._failure: BaseException | None = None
        """Of a chunk whose groups are in others without the store's knowing."""

    async def generate(self, table: pa.Table, version: int, requests: Requests) -> tuple[list[Group], int]:
        """As many groups as the chunk has prompts, all complete, and how many of later chunks it got for it.

        Args:
            table: the prompts of a chunk, all with its `iteration` and `chunk`.
            version: that the engine holds.
            requests: makes requests.
        """
        # Nothing is awaited before the requests are handed over: they carry the version.
        groups = begin(self._engine, table, version, requests)
        number, iteration = (table[name][0].as_py() for name in ("chunk", "iteration"))
        chunk = _Chunk(number, iteration, table, groups, asyncio.get_running_loop().create_future())
        self._open[number] = chunk
        for group in groups:
            asyncio.wrap_future(group.outputs).add_done_callback(partial(self._ended, group))
        try:
            await chunk.complete
            # Another chunk may be telling of this one.
            async with self._telling:
                if self._failure:
                    raise RuntimeError(f"a chunk that had changed groups with others failed: {self._failure}")
                if chunk.untold:
                    await self._tell_of([one for one in self._open.values() if one.untold])
        except BaseException as error:
            if chunk.untold:
                self._failure = error
            self._engine.abort([group.outputs for group in chunk.groups])
            raise
        finally:
            del self._open[number]
        return chunk.groups, chunk.gained

    async def _tell_of(self, chunks: list[_Chunk]) -> None:
        for chunk in chunks:
            chunk.untold = False
        try:
            await self._tell({chunk.number: chunk.prompts() for chunk in chunks})
        except BaseException:
            for chunk in chunks:
                chunk.untold = True
            raise

    def _ended(self, group: Group, outputs: asyncio.Future) -> None:
        """A group is complete, or has failed: its chunk may be complete then, or an earlier one, or fail."""
        error = outputs.exception()
        chunk = next((one for one in self._open.values() if group in one.groups), None)
        if chunk is None or chunk.complete.done():
            return
        if error is not None:
            chunk.complete.set_exception(error)
            return
        for one in (self._given_to_an_earlier(group, chunk), chunk):
            if one and not one.complete.done() and all(map(_done, one.groups)):
                one.complete.set_result(None)

    def _given_to_an_earlier(self, group: Group, chunk: _Chunk) -> _Chunk | None:
        """The first of the chunks before `chunk` in which a group still runs that may be trained as late as this one;
        it has `group` now, and `chunk` has that one."""
        for earlier in sorted(self._open.values(), key=lambda one: one.number):
            if earlier is chunk:
                return None
            # The last one that was begun has probably the furthest to go.
            for place, other in reversed(list(enumerate(earlier.groups))):
                if not _done(other) and self._may_wait(other, chunk.iteration):
                    chunk.groups[chunk.groups.index(group)], earlier.groups[place] = other, group
                    chunk.untold = earlier.untold = True
                    earlier.gained += 1
                    return earlier
        return None

    def _may_wait(self, group: Group, iteration: int) -> bool:
        return self._bound is None or iteration <= group.version + 1 + self._bound


def _done(group: Group) -> bool:
    return group.outputs.done()
