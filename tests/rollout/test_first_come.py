"""Groups that change chunks, on an engine whose responses are as long as their prompts say."""

import asyncio
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.rollout import vllm
from pipeline.rollout.stage import Rollout
from pipeline.store import Ticket
from pipeline.train.staleness import staleness
from tests.rollout.test_oversample import LONG, WAIT, Abortable, chunk, runs, uids
from tests.rollout.test_stage import Make, make  # noqa: F401 (a fixture)

Stage = Callable[..., Rollout]


@pytest.fixture
def stage(make: Make, monkeypatch: pytest.MonkeyPatch) -> Stage:  # noqa: F811
    """A stage that is told of exchanges in `.told`."""

    def made(
        *tickets: Ticket, bound: int = 1, on_stale: str = "drop", n: int = 1, permits: int = 0, **rollout: str
    ) -> Rollout:
        config = make("grpo", n=n)._config
        config.algorithm.max_staleness, config.algorithm.on_stale = bound, on_stale
        config.stream.order = "first_come"
        for name, value in rollout.items():
            setattr(config.rollout, name, value)
        policy: Any = make("grpo", *tickets)._policy
        engine = Abortable(permits)
        monkeypatch.setattr(vllm, "build", lambda *args: engine)
        told: list[dict[int, list[str]]] = []
        overtaken: list[tuple[int, dict[str, int]]] = []

        async def exchanged(name: str, chunks: dict[int, pa.Table]) -> None:
            assert name == stage.name
            for number, table in chunks.items():
                assert set(table["chunk"].to_pylist()) == {number}
            told.append({number: uids(table) for number, table in chunks.items()})

        async def counted(iteration: int, metrics: dict[str, int]) -> None:
            overtaken.append((iteration, metrics))

        policy.exchanged, policy.counted = exchanged, counted
        stage = Rollout(config, policy)
        stage.fake, stage.told, stage.overtaken = engine, told, overtaken  # type: ignore[attr-defined]
        return stage

    return made


def together(stage: Rollout, *tables: pa.Table, errors: bool = False) -> list[Any]:
    """Chunks that an engine works on at the same time, or with `errors` what became of them. The engine takes a step to
    hear of each, and goes on when it has all."""
    fake: Any = stage.fake  # type: ignore[attr-defined]

    async def all_of_them() -> list[Any]:
        made, requests, permits = [], 0, 0
        for table in tables:
            made.append(asyncio.ensure_future(stage(table)))
            requests += len(table) * stage._config.rollout.n
            while len(fake.asked) < requests:
                await asyncio.sleep(0.01)
                if not stage.engine._commands.empty() and stage.engine.steps == permits:
                    fake.permits.release()
                    permits += 1
        fake.permits.release(10**6)
        return await asyncio.wait_for(asyncio.gather(*made, return_exceptions=errors), WAIT)

    return asyncio.run(all_of_them())


def test_what_is_complete_takes_the_place_of_what_is_not(stage: Stage) -> None:
    made = stage(Ticket(0, []), Ticket(0, []), n=2)
    first, second = together(made, chunk(0, 60, 2, iteration=1), chunk(1, 29, 3, iteration=1))
    assert uids(first) == ["1-1", "1-1", "0-1", "0-1"] and first["sample"].to_pylist() == [0, 1, 0, 1]
    assert [len(ids) for ids in first["response_ids"].to_pylist()] == [3, 3, 2, 2]
    assert uids(second) == ["1-0", "1-0", "0-0", "0-0"]
    for number, table in enumerate((first, second)):
        assert set(table["chunk"].to_pylist()) == {number} and set(table["iteration"].to_pylist()) == {1}
    # Of both at once, before the first is handed on, and of the second no more.
    assert made.told == [{0: ["1-1", "0-1"], 1: ["1-0", "0-0"]}]  # type: ignore[attr-defined]
    assert made.overtaken == [(1, {"rollout/overtaken": 1})]  # type: ignore[attr-defined]


def test_a_group_goes_on_in_a_later_iteration_as_far_as_the_bound_lets_it(stage: Stage) -> None:
    for version, late in ((0, False), (1, True)):
        made = stage(Ticket(version, []), Ticket(1, []), update="in_flight", update_kv="keep")
        first, second = together(made, chunk(0, 60, 2, iteration=2), chunk(1, 4, 3, iteration=3))
        assert ("0-0" in uids(second)) == late and ("0-0" in uids(first)) == (not late)
        assert max(map(max, map(staleness, (first, second)))) <= 1
        assert bool(made.told) == late  # type: ignore[attr-defined]


def test_where_rows_past_the_bound_are_corrected_groups_may_pass_it(stage: Stage) -> None:
    made = stage(Ticket(0, []), Ticket(1, []), on_stale="correct", update="in_flight", update_kv="keep")
    first, second = together(made, chunk(0, 60, 2, iteration=2), chunk(1, 4, 3, iteration=3))
    assert "0-0" in uids(second) and max(staleness(second)) == 2


def test_groups_that_are_complete_in_their_order_stay_where_they_are(stage: Stage) -> None:
    made = stage(Ticket(0, []), Ticket(0, []))
    tables = together(made, chunk(0, 2, 3, iteration=1), chunk(1, 40, 50, iteration=1))
    assert [uids(table) for table in tables] == [["0-0", "0-1"], ["1-0", "1-1"]]
    assert made.told == []  # type: ignore[attr-defined]


def test_what_is_told_later_is_heard_later(stage: Stage) -> None:
    made = stage(*[Ticket(0, [])] * 3)
    tell, slow = made._first_come._tell, iter([0.4, 0.0, 0.0])  # type: ignore[union-attr]

    async def late(chunks: dict[int, pa.Table]) -> None:
        await asyncio.sleep(next(slow))
        await tell(chunks)

    made._first_come._tell = late  # type: ignore[union-attr]
    chunks = chunk(0, 60, 2, iteration=1), chunk(1, 70, 30, iteration=1), chunk(2, 1, 3, iteration=1)
    found = [set(uids(table)) for table in together(made, *chunks)]
    assert found == [{"2-0", "0-1"}, {"1-1", "2-1"}, {"0-0", "1-0"}]
    account = {number: uids(table) for number, table in enumerate(chunks)}
    for held in made.told:  # type: ignore[attr-defined]
        account |= held
        assert len({uid for own in account.values() for uid in own}) == 6


def test_a_chunk_that_is_generated_again_changes_no_more(stage: Stage) -> None:
    """The rows that it gave before may be used after all."""
    made = stage(Ticket(0, [], again=True), Ticket(0, []), Ticket(0, []))
    chunks = chunk(0, 30, 2, iteration=1), chunk(1, 9, 3, iteration=1), chunk(2, 1, 1, iteration=1)
    found = [set(uids(table)) for table in together(made, *chunks)]
    assert found == [{"0-0", "0-1"}, {"2-0", "2-1"}, {"1-0", "1-1"}]


def test_a_chunk_that_is_generated_again_has_what_it_was_handed_on_with(stage: Stage) -> None:
    """The store names the prompts, of whatever chunk and generation they were."""
    made = stage(Ticket(2, [], prompts=chunk(7, 4, 5, iteration=9)))
    (table,) = together(made, chunk(1, 2, 3, iteration=3))
    assert uids(table) == ["7-0", "7-1"] and [len(ids) for ids in table["response_ids"].to_pylist()] == [4, 5]
    assert set(table["chunk"].to_pylist()) == {1} and set(table["iteration"].to_pylist()) == {3}
    assert runs(table) == [[(2, 4)], [(2, 5)]]


def test_a_request_that_cannot_be_added_fails_the_chunk_that_has_it(stage: Stage) -> None:
    made = stage(Ticket(0, []), Ticket(0, []), Ticket(0, []), permits=10**6)
    made.fake.bad = [7]  # type: ignore[attr-defined]

    async def both() -> list[Any]:
        tables = chunk(0, LONG, 7, iteration=1), chunk(1, 2, 3, iteration=1)
        return await asyncio.wait_for(asyncio.gather(*map(made, tables), return_exceptions=True), WAIT)

    failed, table = asyncio.run(both())
    assert "prompt is bad" in str(failed) and uids(table) == ["1-0", "1-1"]
    made.engine.call(lambda engine: None, when_idle=True).result(WAIT)
    assert made.engine.steps < LONG and not made._first_come._open, "the long one was given up"  # type: ignore[union-attr]


def test_after_a_chunk_with_changes_has_failed_no_account_is_given(stage: Stage) -> None:
    """Its part would be missing: a group in two chunks, and another one in none."""
    made = stage(*[Ticket(0, [])] * 3)
    refused: list[list[int]] = []

    async def refuse(chunks: dict[int, pa.Table]) -> None:
        await asyncio.sleep(0.1)
        refused.append(sorted(chunks))
        raise RuntimeError("the store is gone")

    made._first_come._tell = refuse  # type: ignore[union-attr]
    tables = chunk(0, 60, 2, iteration=1), chunk(1, 9, 30, iteration=1), chunk(2, 9, 10, iteration=1)
    found = [str(error) for error in together(made, *tables, errors=True)]
    assert len(refused) == 1 and sum(text == "the store is gone" for text in found) == 1
    assert sum("that had changed groups with others failed: the store is gone" in text for text in found) == 2


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=8),
    at_once=st.integers(1, 4),
    bound=st.integers(0, 2),
    ahead=st.integers(0, 2),
)
def test_every_group_is_in_one_chunk_and_none_too_old(
    stage: Stage, lengths: list[tuple[int, ...]], at_once: int, bound: int, ahead: int
) -> None:
    """Two chunks an iteration, and as many at once; each is generated by the version that admission gives it."""
    iterations = [number // 2 + 1 for number in range(len(lengths))]
    ahead = min(ahead, bound)
    made = stage(
        *(Ticket(max(0, iteration - 1 - ahead), []) for iteration in iterations),
        bound=bound,
        update="in_flight",
        permits=10**6,
    )
    made.fake.STEP_S = 0.0  # type: ignore[attr-defined]

    async def all_of_them() -> list[pa.Table]:
        free = asyncio.Semaphore(at_once)

        async def one(number: int) -> pa.Table:
            async with free:
                return await made(chunk(number, *lengths[number], iteration=iterations[number]))

        return list(await asyncio.wait_for(asyncio.gather(*map(one, range(len(lengths)))), WAIT))

    tables = asyncio.run(all_of_them())
    made.engine.close()
    assert sorted(uid for table in tables for uid in uids(table)) == sorted(
        f"{number}-{place}" for number in range(len(lengths)) for place in range(3)
    )
    account = {number: [f"{number}-{place}" for place in range(3)] for number in range(len(lengths))}
    for number, table in enumerate(tables):
        assert set(table["chunk"].to_pylist()) == {number} and len(table) == 3
        assert all(age <= bound for age in staleness(table))
    told = made.told  # type: ignore[attr-defined]
    for chunks in told:
        account |= chunks
        # At any time.
        assert sorted(uid for held in account.values() for uid in held) == sorted(
            f"{number}-{place}" for number in range(len(lengths)) for place in range(3)
        )
    assert account == {number: uids(table) for number, table in enumerate(tables)}
