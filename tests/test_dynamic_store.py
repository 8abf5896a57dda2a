"""Dynamic sampling without Ray: prompt source, engines, filter and trainer as tasks that hold each other up at random.

Whether a group agrees follows from its prompt and the policy version that generates it, as it would in a run.
"""

import asyncio
import itertools
import random
import zlib
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.admission import Admission
from pipeline.dynamic_store import DynamicStore
from pipeline.groups import DynamicSampling, Found, resume
from pipeline.prompts.stage import LOOKAHEAD, Schedule
from pipeline.rollout.weights import Shard
from pipeline.store import POLICY

LONG = 30.0
MOST = 60
"""Batches for an iteration; no test reaches it but those that want to."""


def agrees(prompt: int, version: int, percent: int) -> bool:
    return zlib.crc32(f"{prompt}/{version}".encode()) % 100 < percent


@dataclass(frozen=True)
class Group:
    prompt: int
    version: int
    iteration: int
    chunk: int


@dataclass
class Site:
    """One generation of a run."""

    admission: Admission
    percent: int
    """Of the groups agree."""
    seed: int
    base: int = 0
    start: Any = (0, 0)
    engines: int = 3
    stop: int | None = None
    """The version with which the run is stopped; None goes on to its end."""
    trained: dict[int, list[Group]] = field(default_factory=dict)
    generated: list[int] = field(default_factory=list)
    """Chunks."""
    validated: list[tuple[int, int]] = field(default_factory=list)
    """The version that was to be validated, and the one that was current."""
    test_freq: int = 0

    def __post_init__(self) -> None:
        sampling = self.admission.dynamic
        assert sampling is not None
        self.sampling = sampling
        size, batch = self.admission.chunk_prompts, self.admission.train_batch_size
        self.schedule = Schedule(
            sampling.iterations, batch // size, size, self.test_freq > 0, True, self.test_freq,
            self.admission.max_staleness, sampling.max_num_gen_batches,
        )  # fmt: skip
        self.rng = random.Random(self.seed)
        self.store = DynamicStore(self.admission)
        self.chunks: asyncio.Queue[Any] = asyncio.Queue()
        self.rows: asyncio.Queue[Group | None] = asyncio.Queue()
        self.results: dict[int, Any] = {}
        self.done: asyncio.Condition = asyncio.Condition()

    async def pause(self) -> None:
        for _ in range(self.rng.choice((0, 0, 1, 5, 40))):
            await asyncio.sleep(0)

    async def source(self) -> None:
        """As `EndlessPrompts` does it; the prompts are the numbers from 0."""
        schedule, batch = self.schedule, self.admission.train_batch_size
        (_, offset), first_number, skip = resume(self.start)
        following, place = offset + skip, 0
        for page in range(schedule.pages):
            first = page * schedule.page_iterations
            chunk = (first + 1) * schedule.chunks_per_iteration - 1
            opening = await self.store.open_page(1, page, chunk, LOOKAHEAD, LONG)
            if opening.first and schedule.validates(opening.version, opening.over):
                await self.store.validation(1, opening.version, 1)
                await self.chunks.put((place, -1, [opening.version]))
                place += 1
            if opening.over:
                break
            for number in range(first, first + schedule.page_iterations):
                await self.store.set_batch(1, number, first_number + number, (0, following), {"counted": number})
                for part in range(schedule.chunks_per_iteration):
                    prompts = list(range(following, following + schedule.chunk_prompts))
                    await self.chunks.put((place, number * schedule.chunks_per_iteration + part, prompts))
                    place, following = place + 1, following + schedule.chunk_prompts
            assert following == offset + skip + (first + schedule.page_iterations) * batch
            await self.pause()
        else:
            raise AssertionError("no page was left")
        for _ in range(self.engines):
            await self.chunks.put(None)
        await self.put(place, None)

    async def put(self, place: int, result: Any) -> None:
        async with self.done:
            self.results[place] = result
            self.done.notify_all()

    async def engine(self) -> None:
        """Several chunks at a time, finished in any order."""
        running = []

        async def generate(place: int, chunk: int, prompts: list[int]) -> None:
            if chunk < 0:
                ticket: Any = await self.store.admit_validation(1, prompts[0], LONG)
                self.validated.append((prompts[0], ticket.version))
                await self.pause()
                return await self.put(place, (chunk, prompts))
            ticket = await self.store.admit(1, chunk, LONG)
            if ticket is None:
                return await self.put(place, (chunk, None))
            self.generated.append(chunk)
            await self.pause()
            return await self.put(place, (chunk, [(prompt, ticket.version) for prompt in prompts]))

        while (item := await self.chunks.get()) is not None:
            running.append(asyncio.ensure_future(generate(*item)))
            await self.pause()
        await asyncio.gather(*running)

    async def get(self, place: int) -> Any:
        async with self.done:
            await self.done.wait_for(lambda: place in self.results)
        return self.results.pop(place)

    async def filter(self) -> None:
        """In the order of the stream."""
        for place in itertools.count():
            result = await self.get(place)
            if result is None:
                return await self.rows.put(None)
            chunk, groups = result
            if chunk < 0:
                # Where validation rows end lies in the order of the stream, too.
                await self.store.validated(1, pa.table({"iteration": groups, "uid": ["val"]}))
                continue
            if not groups:
                continue
            kept = [i for i, (prompt, version) in enumerate(groups) if not agrees(prompt, version, self.percent)]
            found = Found(len(groups), kept, len(groups) - len(kept))
            for _ in range(self.rng.choice((1, 1, 2))):  # a chunk may come again
                verdict = await self.store.filtered(1, chunk, found)
            assert not verdict.exhausted, verdict
            for number, i in enumerate(kept[: verdict.taken], verdict.first):
                iteration = verdict.iteration + number // self.batch - verdict.first // self.batch
                await self.rows.put(Group(*groups[i], iteration, number // self.admission.chunk_prompts))

    @property
    def batch(self) -> int:
        return self.admission.train_batch_size

    async def trainer(self) -> None:
        last = self.sampling.iterations if self.stop is None else self.stop
        for version in range(self.base, last + 1):
            validates = self.schedule.validates(version, version == self.sampling.iterations)
            if validates and version == self.base and version > 0:
                validates = False
            shard = Shard(0, [], [], [])
            await self.store.publish(1, version, {POLICY: shard}, 0.0, 0.0, validates)
            if version == last:
                break
            rows = [await self.rows.get() for _ in range(self.batch)]
            assert None not in rows
            self.trained[version + 1] = [row for row in rows if row is not None]
            await self.pause()
        if self.stop is None:
            assert await self.rows.get() is None, "rows came after the last iteration"

    async def run(self) -> Any:
        assert await self.store.new_generation() == 1
        await self.store.begin(1, self.base, 1, self.start)
        tasks = [asyncio.ensure_future(part) for part in (self.source(), self.filter(), self.engine())]
        trainer = asyncio.ensure_future(self.trainer())
        await asyncio.wait(
            [trainer, *tasks], return_when=asyncio.FIRST_EXCEPTION if self.stop is None else "FIRST_COMPLETED"
        )
        await trainer
        position = await self.store.position(1, self.stop or self.sampling.iterations)
        for task in tasks:
            if self.stop is None:
                await task
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return position


def admission(chunk: int, chunks: int, staleness: int, iterations: int, carry: bool = False) -> Admission:
    return Admission(chunk, chunk * chunks, staleness, DynamicSampling(iterations, MOST, carry))


def run(site: Site) -> Any:
    return asyncio.run(asyncio.wait_for(site.run(), LONG))


sizes = st.tuples(st.integers(1, 4), st.integers(1, 3))


def check(site: Site) -> None:
    first = site.base + 1
    chunk, staleness = site.admission.chunk_prompts, site.admission.max_staleness
    for iteration, groups in site.trained.items():
        assert len(groups) == site.batch
        assert {group.iteration for group in groups} == {iteration}
        numbers = [(iteration - first) * site.batch + i for i in range(site.batch)]
        assert [group.chunk for group in groups] == [number // chunk for number in numbers]
        for group in groups:
            assert not agrees(group.prompt, group.version, site.percent)
            assert 0 <= iteration - 1 - group.version <= staleness
    prompts = [group.prompt for groups in site.trained.values() for group in groups]
    assert prompts == sorted(set(prompts)), "every prompt once, in order"


@settings(max_examples=60, deadline=None)
@given(sizes, st.sampled_from([0, 30, 60, 90]), st.integers(0, 10**6), st.integers(0, 10**6))
def test_on_policy_the_same_groups_are_trained_whatever_comes_first(
    size: tuple[int, int], percent: int, one: int, other: int
) -> None:
    sites = [Site(admission(*size, 0, 4), percent, seed, engines=engines) for seed, engines in ((one, 1), (other, 4))]
    ends = [run(site) for site in sites]
    for site in sites:
        check(site)
    assert sites[0].trained == sites[1].trained and list(sites[0].trained) == [1, 2, 3, 4]
    assert ends[0] == ends[1]
    # Nothing was generated that was not needed.
    assert sorted(sites[0].generated) == sorted(sites[1].generated) == list(range(len(sites[0].generated)))


@settings(max_examples=60, deadline=None)
@given(sizes, st.sampled_from([0, 30, 60, 90]), st.integers(1, 3), st.booleans(), st.integers(0, 10**6))
def test_with_staleness_the_bound_holds_and_surplus_is_carried_or_discarded(
    size: tuple[int, int], percent: int, staleness: int, carry: bool, seed: int
) -> None:
    site = Site(admission(*size, staleness, 5, carry), percent, seed)
    run(site)
    check(site)
    assert list(site.trained) == [1, 2, 3, 4, 5]
    if carry:
        kept = [group.prompt for groups in site.trained.values() for group in groups]
        missing = sorted(set(range(kept[-1])) - set(kept))
        assert all(any(agrees(p, v, percent) for v in range(6)) for p in missing), "what was left out agreed"


@settings(max_examples=60, deadline=None)
@given(sizes, st.sampled_from([0, 50, 80]), st.integers(0, 2), st.booleans(), st.integers(1, 3), st.integers(0, 10**6))
def test_a_resumed_run_goes_on_behind_what_was_trained(
    size: tuple[int, int], percent: int, staleness: int, carry: bool, stop: int, seed: int
) -> None:
    rule = admission(*size, staleness, 4, carry and staleness > 0)
    stopped = Site(rule, percent, seed, stop=stop)
    position = run(stopped)
    check(stopped)
    resumed = Site(rule, percent, seed + 1, base=stop, start=position)
    run(resumed)
    check(resumed)
    before = stopped.trained[stop][-1].prompt
    after = resumed.trained[stop + 1][0].prompt
    assert before < after, "no prompt twice"
    if carry:
        (_, offset), _, skip = resume(position)
        assert offset + skip <= after
        # What lies between was generated and dropped before, or is generated again.
        assert all(agrees(p, v, percent) for p in range(before + 1, offset + skip) for v in range(stop)) or skip
    if staleness == 0:
        whole = Site(rule, percent, seed + 2)
        run(whole)
        assert (
            stopped.trained
            | {
                i: [Group(g.prompt, g.version, g.iteration, g.chunk + stop * size[1]) for g in groups]
                for i, groups in resumed.trained.items()
            }
            == whole.trained
        )


@settings(max_examples=60, deadline=None)
@given(sizes, st.sampled_from([0, 50, 90]), st.integers(0, 2), st.integers(1, 3), st.integers(0, 10**6))
# Behind chunks that nobody needs any more, and behind a page whose last chunk would need the version after it.
@example((2, 2), 0, 1, 1, 0)
@example((4, 3), 10, 0, 1, 563064)
def test_every_version_that_is_due_is_validated_while_it_is_current(
    size: tuple[int, int], percent: int, staleness: int, test_freq: int, seed: int
) -> None:
    site = Site(admission(*size, staleness, 5), percent, seed, test_freq=test_freq)
    run(site)
    check(site)
    due = [version for version in range(6) if version % test_freq == 0 or version == 5]
    assert site.validated == [(version, version) for version in due]


def test_positions_say_where_an_iteration_ends() -> None:
    """Chunks of two groups, two chunks to a batch: iteration 1 ends after the first group of the third chunk."""

    async def test(carry: bool) -> tuple[Any, Any, list[dict[str, Any]]]:
        store = DynamicStore(admission(2, 2, int(carry), 3, carry))
        await store.new_generation()
        await store.begin(1, 0, 1, (0, 0))
        await store.publish(1, 0, {POLICY: Shard(0, [], [], [])}, 0.0)
        for batch in range(2):
            await store.set_batch(1, batch, batch + 1, (0, 4 * batch), {"prompts/truncated": batch})
        verdicts = [await store.filtered(1, 0, Found(2, [0, 1], rows=6, score=3.0))]
        verdicts.append(await store.filtered(1, 1, Found(2, [1], equal=1, rows=6, errors=2, score=1.0)))
        verdicts.append(await store.filtered(1, 2, Found(2, [0, 1], rows=6, score=4.0)))
        assert [(v.first, v.taken, v.full) for v in verdicts] == [(0, 2, False), (2, 1, False), (3, 1 + carry, True)]
        assert store.dropped_groups == 1 + (not carry)
        _, messages = await store.read(0, 0.0)
        return await store.position(1, 0), await store.position(1, 1), messages[1:]

    start, end, messages = asyncio.run(test(carry=False))
    assert start == (0, 0) and end == (0, 4, {"batch": 2, "skip": 2})
    assert messages == [
        {
            "kind": "prompts",
            "iteration": 1,
            "metrics": {
                "prompts/truncated": 1,
                "filter_groups/generated": 6,
                "filter_groups/gen_batches": 1.5,
                "filter_groups/dropped_ratio": 1 / 6,
                "filter_groups/equal": 1,
                "filter_groups/failed": 0,
                "filter_groups/surplus": 1,
                "filter_groups/error_rate": 2 / 18,
                "filter_groups/score_mean": 8 / 16,
            },
        }
    ]
    _, end, _ = asyncio.run(test(carry=True))
    assert end == (0, 4, {"batch": 2, "skip": 1}), "the carried group's prompt is not used up"


def test_what_cannot_fill_an_iteration_is_exhausted_and_no_sooner() -> None:
    async def test() -> list[tuple[bool, bool]]:
        store = DynamicStore(Admission(2, 4, 0, DynamicSampling(9, 2, False)))
        await store.new_generation()
        await store.begin(1, 3, 1, (0, 0))
        await store.publish(1, 3, {POLICY: Shard(0, [], [], [])}, 0.0)
        made = []
        for chunk in range(4):
            await asyncio.wait_for(store.admit(1, chunk, LONG), 1.0)
            verdict = await store.filtered(1, chunk, Found(2, [0] if chunk == 1 else [], 1 + (chunk != 1)))
            assert verdict.iteration == 4
            made.append((verdict.full, verdict.exhausted))
        return made

    assert asyncio.run(test()) == [(False, False)] * 3 + [(False, True)]


def test_a_new_generation_begins_with_an_empty_account() -> None:
    async def test() -> None:
        store = DynamicStore(admission(2, 2, 0, 3))
        for generation in (1, 2):
            assert await store.new_generation() == generation
            await store.begin(generation, 0, 1, (0, 0))
            await store.publish(generation, 0, {POLICY: Shard(0, [], [], [])}, 0.0)
            verdict = await store.filtered(generation, 0, Found(2, [1], 1))
            assert verdict.first == 0 and store.dropped_groups == 1
            with pytest.raises(RuntimeError, match="generation 0 of the stream has ended"):
                await store.filtered(0, 0, Found(2, [], 2))

    asyncio.run(test())
