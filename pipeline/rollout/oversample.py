"""More groups than a chunk gives, and the slowest of them cut off (`rollout.oversample`).

A chunk of training prompts begins with a few groups more than it gives. It is done as soon as enough groups are
complete, so nobody waits for the longest responses. What becomes of the others is a choice:

- `drop`: they are aborted, and their prompts are used up.
- `cancel`: they are aborted, and begun anew with a chunk of a later policy version; once, then they are dropped.
- `carry`: they run on, with in-flight updates, and count among the groups of a later chunk of the same engine: a
  response that is too long for one iteration goes on in the next. With `rollout.partial_tokens` responses are
  interrupted when they have so many tokens, and go on with a chunk of a later iteration (`partial.py`): those of as
  many groups as the chunk has too many. Others go on at once, since the chunk needs them.

A chunk that takes up groups of earlier ones begins as many fewer of its own prompts, so that no engine has ever more to
do. Every chunk gives the same number of groups, whatever was cut, so nothing behind the engine knows of it. Of what an
engine holds back, it loses everything when it ends: these prompts count as dropped.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

import pyarrow as pa

from pipeline.config import Config
from pipeline.rollout import partial
from pipeline.rollout.engine import EngineLoop
from pipeline.rollout.group import Group, Requests, begin

CARRY, CANCEL = "carry", "cancel"

Holding = Callable[[], AbstractAsyncContextManager[int]]
"""The version that the engine holds, which stays for as long as the context."""


@dataclass
class Cut:
    """What oversampling did to a chunk, in groups."""

    begun: int = 0
    """Of its own prompts."""
    taken_up: int = 0
    """Of earlier chunks."""
    interrupted: int = 0
    """Of these, those that go on behind an interruption (`partial_tokens`)."""
    cut_off: int = 0
    """That were not among those that it gives."""
    lost: int = 0
    """That will be in no chunk: dropped, grown too old, or failed with an update."""
    not_begun: int = 0
    """Of its own prompts whose places earlier ones have taken."""

    def metrics(self) -> dict[str, int]:
        return {f"oversample/{name}": count for name, count in vars(self).items()}


class Oversampling:
    """What one engine holds back from chunk to chunk; used from one event loop.

    Args:
        config: the run's configuration.
        engine: runs the requests.
        holding: what the engine holds.
    """

    def __init__(self, config: Config, engine: EngineLoop, holding: Holding):
        rollout, algorithm = config.rollout, config.algorithm
        self._engine, self._holding, self._policy = engine, holding, rollout.oversample_policy
        self._partial = rollout.partial_tokens
        self._gives, self._more = rollout.chunk_prompts, rollout.begun_prompts - rollout.chunk_prompts
        # What is too old to be trained on need not be generated.
        self._oldest = algorithm.max_staleness if algorithm.on_stale == "drop" else None
        self._held: list[tuple[int, Group]] = []
        """Each with the iteration of the chunk that cut it off."""

    async def generate(self, table: pa.Table, version: int, requests: Requests) -> tuple[list[Group], Cut]:
        """The first groups to be complete, in the order in which they were begun, and what became of the others.

        Args:
            table: the prompts of a chunk, all with its `iteration` and `chunk`.
            version: that the engine holds.
            requests: makes requests.
        """
        cut = Cut()
        iteration = table["iteration"][0].as_py()
        groups = self._groups(table, iteration, version, requests, cut)
        try:
            chosen = await self._first(groups)
        except BaseException:
            self._engine.abort([group.outputs for group in groups])
            raise
        self._hold([group for place, group in enumerate(groups) if place not in chosen], iteration, cut)
        return [groups[place] for place in sorted(chosen)], cut

    def _groups(self, table: pa.Table, iteration: int, version: int, requests: Requests, cut: Cut) -> list[Group]:
        """What the chunk begins with. Nothing is awaited here: requests carry the version."""
        held = self._take_up(iteration, version, cut)
        cut.taken_up, cut.not_begun = len(held), len(held)
        own = table.slice(0, len(table) - len(held))
        cut.begun = len(own)
        if self._policy == CARRY:
            return [*held, *self._begin(own, version, requests)]
        prompts = [group.prompt for group in held]
        anew = begin(self._engine, pa.concat_tables(prompts), version, requests) if held else []
        return [*(replace(group, again=True) for group in anew), *begin(self._engine, own, version, requests)]

    def _begin(self, prompts: pa.Table, version: int, requests: Requests) -> list[Group]:
        if self._partial:
            return partial.begin(self._engine, prompts, version, requests, self._partial)
        return begin(self._engine, prompts, version, requests)

    def _take_up(self, iteration: int, version: int, cut: Cut) -> list[Group]:
        """Groups of earlier chunks that this one goes on with, or begins anew: at most as many as it has too many."""
        taken: list[Group] = []
        held: list[tuple[int, Group]] = []
        useless: list[Group] = []
        for since, group in self._held:
            # Asked once: the engine goes on meanwhile.
            interrupted = group.interrupted
            # The same version would say anew what it said before, and as slowly.
            ready = (iteration > since or not interrupted) if self._policy == CARRY else group.version < version
            if self._policy == CARRY and (self._too_old(group, iteration) or _failed(group)):
                useless.append(group)
            elif len(taken) < self._more and ready:
                cut.interrupted += interrupted
                taken.append(self._go_on(group, version) if interrupted else group)
            else:
                held.append((since, group))
        self._held = held
        if useless:
            self._engine.abort([group.outputs for group in useless])
        cut.lost += len(useless)
        return taken

    def _go_on(self, group: Group, version: int) -> Group:
        assert isinstance(group, partial.PartialGroup)
        return group.again_by(self._engine, version)

    def _too_old(self, group: Group, iteration: int) -> bool:
        return self._oldest is not None and iteration - 1 - group.version > self._oldest

    async def _first(self, groups: list[Group]) -> set[int]:
        """Places of the groups that are complete first, as many as a chunk gives.

        Groups that are interrupted and needed for that go on, in their order, and are replaced in `groups`.
        """
        order: list[int] = []

        def note(place: int) -> None:
            # In the engine's thread: the event loop sees several at a time, and not which of them came first.
            if not groups[place].interrupted:
                order.append(place)

        def watch(place: int) -> asyncio.Future:
            groups[place].outputs.add_done_callback(lambda outputs: note(place))
            return asyncio.wrap_future(groups[place].outputs)

        pending, complete = {watch(place): place for place in range(len(groups))}, 0
        stopped: list[int] = []
        try:
            while complete < self._gives:
                while complete + len(pending) < self._gives:
                    place = stopped.pop(0)
                    async with self._holding() as version:
                        groups[place] = self._go_on(groups[place], version)
                    pending[watch(place)] = place
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    place = pending.pop(future)
                    # An error of the engine, or of what it was asked.
                    future.result()
                    if groups[place].interrupted:
                        stopped.append(place)
                    else:
                        complete += 1
                stopped.sort()
        finally:
            for future in pending:
                future.cancel()
        return set(order[: self._gives])

    def _hold(self, groups: list[Group], iteration: int, cut: Cut) -> None:
        """Groups that a chunk of an iteration has cut off."""
        cut.cut_off = len(groups)
        if self._policy != CARRY and groups:
            self._engine.abort([group.outputs for group in groups])
        for group in groups:
            if self._policy == CARRY or (self._policy == CANCEL and not group.again):
                self._held.append((iteration, group))
            else:
                cut.lost += 1


def _failed(group: Group) -> bool:
    return group.outputs.done() and group.outputs.exception() is not None
