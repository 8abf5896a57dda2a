"""Dynamic sampling without Ray: prompt source, engines, filter and trainer as tasks that hold each other up at random.

Whether a group agrees follows from its prompt and the policy version that generates it, as it would in a run.
"""

import asyncio
import itertools
import random
import zlib
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.dynamic_sampling.ledger import ChunkStats, FilterRules, Ledger
from pipeline.prompts.stage import LOOKAHEAD, Schedule
from pipeline.store.admission import Admission
from pipeline.store.cursor import PromptCursor
from pipeline.store.events import PromptScores, PromptsMade, ValidationScored
from pipeline.store.policy_store import PolicyStore
from pipeline.store.prompt_ledger import PromptBatch
from pipeline.store.status import TrainerState
from pipeline.store.versions import POLICY
from pipeline.weights.load import Shard

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


@dataclass
class Site:
    """One attempt of a run."""

    admission: Admission
    percent: int
    """Of the groups agree."""
    seed: int
    base: int = 0
    start: PromptCursor = PromptCursor()
    carry: bool = False
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
        last = self.admission.last_iteration
        assert last is not None
        self.last = last
        size, batch = self.admission.chunk_prompts, self.admission.train_batch_size
        self.schedule = Schedule(
            last, batch // size, size, self.test_freq > 0, True, self.test_freq, self.admission.max_staleness, MOST,
        )  # fmt: skip
        self.rng = random.Random(self.seed)
        self.store = PolicyStore(self.admission)
        self.rules = FilterRules("score", MOST, self.carry, batch, size, last, 1.0)
        self.ledger = Ledger(self.rules, self.base)
        self.chunks: asyncio.Queue[Any] = asyncio.Queue()
        self.rows: asyncio.Queue[Group | None] = asyncio.Queue()
        self.results: dict[int, Any] = {}
        self.done: asyncio.Condition = asyncio.Condition()

    async def pause(self) -> None:
        for _ in range(self.rng.choice((0, 0, 1, 5, 40))):
            await asyncio.sleep(0)

    async def source(self) -> None:
        """As `Prompts` does it; the prompts are the numbers from 0."""
        schedule, batch = self.schedule, self.admission.train_batch_size
        start = self.start
        following, place = start.offset + start.skip, 0
        for page in range(schedule.pages):
            first = page * schedule.page_iterations
            chunk = (first + 1) * schedule.chunks_per_iteration - 1
            opening = await self.store.grant_page(1, page, chunk, LOOKAHEAD, LONG)
            if opening.first and schedule.validates(opening.version, opening.over):
                await self.store.announce_validation(1, opening.version, 1)
                await self.chunks.put((place, -1, [opening.version]))
                place += 1
            if opening.over:
                break
            for number in range(first, first + schedule.page_iterations):
                cursor = PromptCursor(0, following, batch=start.batch + number)
                await self.store.report_prompts(1, [PromptBatch(number, cursor, {"counted": number})])
                for part in range(schedule.chunks_per_iteration):
                    prompts = list(range(following, following + schedule.chunk_prompts))
                    await self.chunks.put((place, number * schedule.chunks_per_iteration + part, prompts))
                    place, following = place + 1, following + schedule.chunk_prompts
            assert following == start.offset + start.skip + (first + schedule.page_iterations) * batch
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
                scores = PromptScores("math", "val", 1, [1.0], [0])
                await self.store.record_validation(1, ValidationScored(groups[0], [scores], 0.1))
                continue
            if not groups:
                continue
            kept = [i for i, (prompt, version) in enumerate(groups) if not agrees(prompt, version, self.percent)]
            found = ChunkStats(len(groups), kept, len(groups) - len(kept))
            for _ in range(self.rng.choice((1, 1, 2))):  # a chunk may come again
                verdict = self.ledger.known(chunk)
                if verdict is None:
                    verdict = self.ledger.decide(chunk, found)
                    if verdict.full:
                        await self.store.report_filled(1, verdict.iteration, *verdict.used, {})
                await self.store.report_groups(1, self.ledger.kept, self.ledger.dropped)
            assert not verdict.exhausted, verdict
            for number, i in enumerate(kept[: verdict.taken], verdict.first):
                iteration = verdict.iteration + number // self.batch - verdict.first // self.batch
                await self.rows.put(Group(*groups[i], iteration))

    @property
    def batch(self) -> int:
        return self.admission.train_batch_size

    async def trainer(self) -> None:
        last = self.last if self.stop is None else self.stop
        for version in range(self.base, last + 1):
            validates = self.schedule.validates(version, version == self.last)
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
        assert await self.store.new_attempt() == 1
        await self.store.register_trainer(1, TrainerState(self.base, self.start, True), 1)
        tasks = [asyncio.ensure_future(part) for part in (self.source(), self.filter(), self.engine())]
        trainer = asyncio.ensure_future(self.trainer())
        await asyncio.wait(
            [trainer, *tasks], return_when=asyncio.FIRST_EXCEPTION if self.stop is None else "FIRST_COMPLETED"
        )
        await trainer
        position = await self.store.end_of_iteration(1, self.stop or self.last)
        for task in tasks:
            if self.stop is None:
                await task
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return position


def admission(chunk: int, chunks: int, staleness: int, iterations: int) -> Admission:
    return Admission(chunk, chunk * chunks, staleness, iterations)


def run(site: Site) -> Any:
    return asyncio.run(asyncio.wait_for(site.run(), LONG))


sizes = st.tuples(st.integers(1, 4), st.integers(1, 3))


def check(site: Site) -> None:
    staleness = site.admission.max_staleness
    for iteration, groups in site.trained.items():
        assert len(groups) == site.batch
        assert {group.iteration for group in groups} == {iteration}
        for group in groups:
            assert not agrees(group.prompt, group.version, site.percent)
            assert 0 <= iteration - 1 - group.version <= staleness
    prompts = [group.prompt for groups in site.trained.values() for group in groups]
    assert prompts == sorted(set(prompts)), "every prompt once, in order"


@settings(max_examples=60)
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


@settings(max_examples=60)
@given(sizes, st.sampled_from([0, 30, 60, 90]), st.integers(1, 3), st.booleans(), st.integers(0, 10**6))
def test_with_staleness_the_bound_holds_and_surplus_is_carried_or_discarded(
    size: tuple[int, int], percent: int, staleness: int, carry: bool, seed: int
) -> None:
    site = Site(admission(*size, staleness, 5), percent, seed, carry=carry)
    run(site)
    check(site)
    assert list(site.trained) == [1, 2, 3, 4, 5]
    if carry:
        kept = [group.prompt for groups in site.trained.values() for group in groups]
        missing = sorted(set(range(kept[-1])) - set(kept))
        assert all(any(agrees(p, v, percent) for v in range(6)) for p in missing), "what was left out agreed"


@settings(max_examples=60)
@given(sizes, st.sampled_from([0, 50, 80]), st.integers(0, 2), st.booleans(), st.integers(1, 3), st.integers(0, 10**6))
def test_a_resumed_run_goes_on_behind_what_was_trained(
    size: tuple[int, int], percent: int, staleness: int, carry: bool, stop: int, seed: int
) -> None:
    rule, carry = admission(*size, staleness, 4), carry and staleness > 0
    stopped = Site(rule, percent, seed, stop=stop, carry=carry)
    position = run(stopped)
    check(stopped)
    resumed = Site(rule, percent, seed + 1, base=stop, start=position, carry=carry)
    run(resumed)
    check(resumed)
    before = stopped.trained[stop][-1].prompt
    after = resumed.trained[stop + 1][0].prompt
    assert before < after, "no prompt twice"
    if carry:
        offset, skip = position.offset, position.skip
        assert offset + skip <= after
        # What lies between was generated and dropped before, or is generated again.
        assert all(agrees(p, v, percent) for p in range(before + 1, offset + skip) for v in range(stop)) or skip
    if staleness == 0:
        whole = Site(rule, percent, seed + 2, carry=carry)
        run(whole)
        assert stopped.trained | resumed.trained == whole.trained


@settings(max_examples=60)
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


def rules(most: int, batch: int, carry: bool = False) -> FilterRules:
    return FilterRules("score", most, carry, batch, 2, 9, 1.0)


@pytest.mark.parametrize("carry", [False, True])
def test_where_an_iteration_ends(carry: bool) -> None:
    """Chunks of two groups, two to an iteration: iteration 1 ends after the first group of the third chunk."""
    ledger = Ledger(rules(MOST, 4, carry), 0)
    decisions = [ledger.decide(0, ChunkStats(2, [0, 1], rows=6, score=3.0))]
    decisions.append(ledger.decide(1, ChunkStats(2, [1], equal=1, rows=6, errors=2, score=1.0)))
    decisions.append(ledger.decide(2, ChunkStats(2, [0, 1], rows=6, score=4.0)))
    assert [(d.first, d.taken, d.full) for d in decisions] == [(0, 2, False), (2, 1, False), (3, 1 + carry, True)]
    assert ledger.dropped == 1 + (not carry)
    assert decisions[-1].used == (1, 1 if carry else 2), "the carried group's prompt is not used up"
    assert decisions[-1].stats.metrics(4) == {
        "filter_groups/generated": 6,
        "filter_groups/gen_batches": 1.5,
        "filter_groups/dropped_ratio": 1 / 6,
        "filter_groups/equal": 1,
        "filter_groups/failed": 0,
        "filter_groups/surplus": 1,
        "filter_groups/error_rate": 2 / 18,
        "filter_groups/score_mean": 8 / 16,
    }


def test_the_store_names_the_place_and_tells_the_driver() -> None:
    async def test() -> None:
        store = PolicyStore(admission(2, 2, 0, 3))
        await store.new_attempt()
        await store.register_trainer(1, TrainerState(0, PromptCursor(), False), 1)
        batches = [PromptBatch(n, PromptCursor(0, 4 * n, batch=n + 1), {"prompts/truncated": n}) for n in range(2)]
        await store.report_prompts(1, batches)
        await store.report_filled(1, 1, 1, 2, {"filter_groups/equal": 5})
        assert await store.end_of_iteration(1, 0) == PromptCursor()
        assert await store.end_of_iteration(1, 1) == PromptCursor(0, 4, batch=2, skip=2)
        with pytest.raises(KeyError):
            await store.end_of_iteration(1, 2)
        _, events = await store.read_events(1, 0.0)
        assert events == [PromptsMade(1, {"prompts/truncated": 1, "filter_groups/equal": 5})]

    asyncio.run(test())


def test_what_cannot_fill_an_iteration_is_exhausted_and_no_sooner() -> None:
    ledger = Ledger(rules(2, 4), 3)
    made = [ledger.decide(chunk, ChunkStats(2, [0] if chunk == 1 else [], 1 + (chunk != 1))) for chunk in range(4)]
    assert {decision.iteration for decision in made} == {4}
    assert [(decision.full, decision.exhausted) for decision in made] == [(False, False)] * 3 + [(False, True)]
