"""The policy store of a run with `stream.order=first_come`: it also knows which prompts changed chunks.

engine        `exchanged(chunks)`                         before it hands on a chunk with groups of others
              `admit(chunk)` -> ticket with prompts       of a chunk that changed, and is generated again
train rank 0  `checkpoint_position(k)`                    where iteration k ended, and what later chunks hold

An account is kept of those chunks alone whose prompts are not their own, and until their iteration is trained. At any
time every prompt is in one chunk, also by this account: an engine tells of all its chunks that changed at once. A chunk
that is generated again changes no more: the rows that it gave before may be used after all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from pipeline.admission import Admission
from pipeline.prompts.place import with_more, without
from pipeline.published import Ticket
from pipeline.rows import PROMPT
from pipeline.store import PolicyStore

Place = tuple[int, int]
"""Of a chunk in the run: its iteration, and its number among those of the iteration."""


class FirstComeStore(PolicyStore):
    """`PolicyStore` where groups may be trained in another chunk than their own."""

    def __init__(self, admission: Admission, first: Callable[[], int] = int):
        super().__init__(admission, first)
        self._held: dict[Place, pa.Table] = {}
        self._engine_of: dict[Place, str] = {}
        """Which engine began a chunk, and may change its prompts; nobody once it is generated again."""

    async def new_generation(self) -> int:
        self._held, self._engine_of = {}, {}
        return await super().new_generation()

    async def begin(self, generation: int, version: int, world_size: int, start: Any) -> None:
        self._check(generation)
        start, self._held = resume(start)
        await super().begin(generation, version, world_size, start)

    async def admit(self, generation: int, chunk: int, timeout: float, engine: str = "") -> Ticket:
        """As `PolicyStore.admit`; the ticket has the prompts of a chunk that no longer has its own, and says whether
        another engine, or one before in its place, has begun it."""
        ticket = await super().admit(generation, chunk, timeout, engine)
        place = self._place(chunk)
        for account in (self._held, self._engine_of):
            for trained in [one for one in account if one[0] <= self.version]:
                del account[trained]
        again = place in self._engine_of
        if engine:
            self._engine_of[place] = "" if again else engine
        return replace(ticket, prompts=self._held.get(place), again=again)

    async def exchanged(self, generation: int, engine: str, chunks: Mapping[int, pa.Table]) -> None:
        """Groups of an engine have changed places.

        Args:
            generation: of the stream.
            engine: its name.
            chunks: by their numbers, the prompts of all its chunks that have changed since it told of them.

        Raises:
            RuntimeError: one of the chunks has been begun again since, by another engine or by this one.
        """
        async with self._changed:
            self._check(generation)
            held = {self._place(chunk): prompts for chunk, prompts in chunks.items()}
            if any(self._engine_of.get(place) != engine for place in held):
                raise RuntimeError(f"engine {engine} was taken for lost, and its chunks are generated again")
            self._held |= held

    async def checkpoint_position(self, generation: int, iteration: int) -> Any:
        state = await self.position(generation, iteration)
        return position(state, {place: held for place, held in self._held.items() if place[0] > iteration})

    def _place(self, chunk: int) -> Place:
        later, number = divmod(chunk, self.admission.train_batch_size // self.admission.chunk_prompts)
        return self.base + 1 + later, number


def position(state: Sequence[Any], held: Mapping[Place, pa.Table]) -> tuple[Any, ...]:
    """A place in the prompts: `state` of the source, and what chunks behind it hold instead of their own. As JSON can
    hold it."""
    if not held:
        return tuple(state)
    chunks = [[*place, prompts.to_pylist()] for place, prompts in sorted(held.items(), key=lambda one: one[0])]
    return with_more(state, chunks=chunks)


def resume(place: Sequence[Any]) -> tuple[tuple[Any, ...], dict[Place, pa.Table]]:
    """The state of the source and the chunks, of a place that `position` made or that another run left."""
    state, own = without(place, "chunks")
    chunks = own.get("chunks", [])
    return state, {(iteration, number): pa.Table.from_pylist(rows, PROMPT) for iteration, number, rows in chunks}
