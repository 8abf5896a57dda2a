"""More groups than a chunk gives, and the slowest of them cut off (`rollout.oversample`).

A chunk of training prompts begins with a few groups more than it gives. It is done as soon as enough groups are
complete, so nobody waits for the longest responses. What becomes of the others is a choice:

- `drop`: they are aborted, and their prompts are used up.
- `cancel`: they are aborted, and begun anew with a chunk of a later policy version; once, then they are dropped.
- `carry`: they run on, with in-flight updates, and count among the groups of a later chunk of the same engine: a
  response that is too long for one iteration goes on in the next.

A chunk that takes up groups of earlier ones begins as many fewer of its own prompts, so that no engine has ever more to
do. Every chunk gives the same number of groups, whatever was cut, so nothing behind the engine knows of it. Of what an
engine holds back, it loses everything when it ends: these prompts count as dropped.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from pipeline.config import Config
from pipeline.rollout.engine import EngineLoop

CARRY, CANCEL = "carry", "cancel"

Requests = Callable[[pa.Table, int], list[tuple[Any, Any]]]
"""The requests for prompts by an engine that holds a version, equally many for each prompt."""


@dataclass(frozen=True)
class Group:
    """The responses to one prompt, under way or complete."""

    prompt: pa.Table
    """One row."""
    version: int
    """Of the policy when they were begun."""
    outputs: Future
    again: bool = False
    """Whether they were cut off and begun anew."""


@dataclass
class Cut:
    """What oversampling did to a chunk, in groups."""

    begun: int = 0
    """Of its own prompts."""
    taken_up: int = 0
    """Of earlier chunks."""
    cut_off: int = 0
    """That were not among those that it gives."""
    lost: int = 0
    """That will be in no chunk: dropped, grown too old, or failed with an update."""
    not_begun: int = 0
    """Of its own prompts whose places earlier ones have taken."""

    def metrics(self) -> dict[str, int]:
        return {f"oversample/{name}": count for name, count in vars(self).items()}


@dataclass
class Complete:
    """The groups of a chunk that were complete first."""

    prompts: pa.Table
    outputs: list[Any]
    """Of all requests, prompt by prompt."""
    versions: list[int]
    """[prompts] that the engine held when each was begun."""
    cut: Cut | None = None
    """None where nothing is cut off."""


class Oversampling:
    """What one engine holds back from chunk to chunk; used from one event loop.

    Args:
        config: the run's configuration.
        engine: runs the requests.
    """

    def __init__(self, config: Config, engine: EngineLoop):
        rollout, algorithm = config.rollout, config.algorithm
        self._engine, self._policy = engine, rollout.oversample_policy
        self._gives, self._more = rollout.chunk_prompts, rollout.begun_prompts - rollout.chunk_prompts
        # What is too old to be trained on need not be generated.
        self._oldest = algorithm.max_staleness if algorithm.on_stale == "drop" else None
        self._held: list[Group] = []

    async def generate(self, table: pa.Table, version: int, requests: Requests) -> Complete:
        """The first groups to be complete, in the order in which they were begun.

        Args:
            table: the prompts of a chunk, all with its `iteration` and `chunk`.
            version: that the engine holds.
            requests: makes requests.
        """
        cut = Cut()
        groups = self._groups(table, version, requests, cut)
        try:
            chosen = await self._first(groups)
        except BaseException:
            self._engine.abort([group.outputs for group in groups])
            raise
        self._hold([group for place, group in enumerate(groups) if place not in chosen], cut)
        taken = [groups[place] for place in sorted(chosen)]
        return Complete(
            pa.concat_tables([_stamped(group.prompt, table) for group in taken]),
            [output for group in taken for output in group.outputs.result()],
            [group.version for group in taken],
            cut,
        )

    def _groups(self, table: pa.Table, version: int, requests: Requests, cut: Cut) -> list[Group]:
        """What the chunk begins with. Nothing is awaited here: requests carry the version."""
        held = self._take_up(table["iteration"][0].as_py(), version, cut)
        cut.taken_up, cut.not_begun = len(held), len(held)
        own = table.slice(0, len(table) - len(held))
        cut.begun = len(own)
        if self._policy == CARRY:
            return [*held, *self._begin(own, version, requests)]
        anew = self._begin(pa.concat_tables([group.prompt for group in held]), version, requests) if held else []
        return [*(replace(group, again=True) for group in anew), *self._begin(own, version, requests)]

    def _begin(self, prompts: pa.Table, version: int, requests: Requests) -> list[Group]:
        pairs = requests(prompts, version)
        each = len(pairs) // max(1, len(prompts))
        return [
            Group(prompts.slice(number, 1), version, self._engine.submit(pairs[number * each : (number + 1) * each]))
            for number in range(len(prompts))
        ]

    def _take_up(self, iteration: int, version: int, cut: Cut) -> list[Group]:
        """Groups of earlier chunks that this one goes on with, or begins anew: at most as many as it has too many."""
        taken: list[Group] = []
        held: list[Group] = []
        useless: list[Group] = []
        for group in self._held:
            if self._policy == CARRY and (self._too_old(group, iteration) or _failed(group)):
                useless.append(group)
            # The same version would say the same again, and as slowly.
            elif len(taken) < self._more and (self._policy == CARRY or group.version < version):
                taken.append(group)
            else:
                held.append(group)
        self._held = held
        if useless:
            self._engine.abort([group.outputs for group in useless])
        cut.lost += len(useless)
        return taken

    def _too_old(self, group: Group, iteration: int) -> bool:
        return self._oldest is not None and iteration - 1 - group.version > self._oldest

    async def _first(self, groups: Sequence[Group]) -> set[int]:
        """Places of the groups that are complete first, as many as a chunk gives."""
        order: list[int] = []

        def note(place: int, outputs: Future) -> None:
            # In the engine's thread: the event loop sees several at a time, and not which of them came first.
            order.append(place)

        for place, group in enumerate(groups):
            group.outputs.add_done_callback(partial(note, place))
        pending: set[asyncio.Future] = {asyncio.wrap_future(group.outputs) for group in groups}
        complete = 0
        try:
            while complete < self._gives:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    # An error of the engine, or of what it was asked.
                    future.result()
                complete += len(done)
        finally:
            for future in pending:
                future.cancel()
        return set(order[: self._gives])

    def _hold(self, groups: Sequence[Group], cut: Cut) -> None:
        """Groups that were cut off."""
        cut.cut_off = len(groups)
        if self._policy != CARRY and groups:
            self._engine.abort([group.outputs for group in groups])
        for group in groups:
            if self._policy == CARRY or (self._policy == CANCEL and not group.again):
                self._held.append(group)
            else:
                cut.lost += 1


def _failed(group: Group) -> bool:
    return group.outputs.done() and group.outputs.exception() is not None


def _stamped(prompt: pa.Table, table: pa.Table) -> pa.Table:
    """The row of a prompt as one of the chunk `table`."""
    for name in ("chunk", "iteration"):
        place = prompt.column_names.index(name)
        prompt = prompt.set_column(place, table.schema.field(place), table[name].slice(0, 1))
    return prompt
