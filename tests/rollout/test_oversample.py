"""Groups that are begun and cut off, on an engine whose responses are as long as their prompts say."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import rows
from pipeline.rollout import vllm
from pipeline.rollout.stage import Rollout
from pipeline.store import Ticket
from pipeline.train.staleness import staleness
from tests.rollout.test_in_flight import Slow
from tests.rollout.test_stage import Make, make  # noqa: F401 (a fixture)

WAIT = 30.0
LONG = 400


class Abortable(Slow):
    """Takes one step after the other, as soon as it has a permit."""

    STEP_S = 0.005

    def __init__(self, permits: int) -> None:
        super().__init__(threading.Semaphore(permits))
        self.aborted: list[str] = []
        self.bad: list[int] = []
        """A prompt that is refused."""

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any) -> None:
        if prompt["prompt_token_ids"] == self.bad:
            raise ValueError("prompt is bad")
        super().add_request(request_id, prompt, params)

    def step(self) -> list[Any]:
        time.sleep(self.STEP_S)
        return super().step()

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for name in request_ids:
            del self._tokens[name]


Stage = Callable[..., Rollout]


@pytest.fixture
def stage(make: Make, monkeypatch: pytest.MonkeyPatch) -> Stage:  # noqa: F811
    """A stage whose chunks begin with 3 groups of `n` and give 2; what it reports is in `.told`."""

    def made(policy: str, *tickets: Ticket, n: int = 1, bound: int = 1, on_stale: str = "drop", permits: int = 10**6):
        first = make("grpo", *tickets, n=n)
        config = first._config
        config.rollout.chunk_prompts, config.rollout.oversample, config.rollout.oversample_policy = 2, 0.5, policy
        config.rollout.update = "in_flight" if policy == "carry" else "between_chunks"
        config.algorithm.max_staleness, config.algorithm.on_stale = bound, on_stale
        engine = Abortable(permits)
        monkeypatch.setattr(vllm, "build", lambda *args: engine)
        told: list[tuple[int, dict[str, int]]] = []

        async def counted(iteration: int, metrics: dict[str, int]) -> None:
            told.append((iteration, {name.removeprefix("oversample/"): count for name, count in metrics.items()}))

        first._policy.counted = counted  # type: ignore[method-assign]
        rebuilt = Rollout(config, first._policy)
        rebuilt.fake, rebuilt.told = engine, told  # type: ignore[attr-defined]
        return rebuilt

    return made


def chunk(number: int, *lengths: int, iteration: int | None = None, split: str = "train") -> pa.Table:
    """Prompts `number`-0, `number`-1 and so on; unless it is said, each chunk is an iteration."""
    count = len(lengths)
    values: dict[str, list[Any]] = dict.fromkeys(rows.PROMPT.names, [None] * count) | {
        "split": [split] * count,
        "chunk": [number] * count,
        "iteration": [number if iteration is None else iteration] * count,
        "uid": [f"{number}-{place}" for place in range(count)],
        "prompt_ids": [[length] for length in lengths],
    }
    return pa.table(values, schema=rows.PROMPT)


def generate(stage: Rollout, *tables: pa.Table) -> list[pa.Table]:
    """The chunks one after the other, as one engine makes them."""

    async def one_by_one() -> list[pa.Table]:
        return [await asyncio.wait_for(stage(table), WAIT) for table in tables]

    return asyncio.run(one_by_one())


def uids(table: pa.Table) -> list[str]:
    return table["uid"].to_pylist()


def runs(table: pa.Table) -> list[list[tuple[int, int]]]:
    return [[(run["version"], run["tokens"]) for run in own] for own in table["version_runs"].to_pylist()]


def counts(begun: int, taken_up: int, cut_off: int, lost: int) -> dict[str, int]:
    told = {"begun": begun, "taken_up": taken_up, "cut_off": cut_off, "lost": lost, "not_begun": taken_up}
    return told | {"interrupted": 0}


def test_the_slowest_groups_are_dropped_and_nobody_waits_for_them(stage: Stage) -> None:
    made = stage("drop", Ticket(0, []), Ticket(0, []), n=2)
    first, second = generate(made, chunk(1, LONG, 2, 3), chunk(2, 4, LONG, 1))
    assert uids(first) == ["1-1", "1-1", "1-2", "1-2"] and first["sample"].to_pylist() == [0, 1, 0, 1]
    assert [len(ids) for ids in first["response_ids"].to_pylist()] == [2, 2, 3, 3]
    assert uids(second) == ["2-0", "2-0", "2-2", "2-2"]
    assert made.engine.steps < LONG, "the long ones were not generated"  # type: ignore[attr-defined]
    made.engine.call(lambda engine: None).result(WAIT)
    assert made.fake.aborted == ["0", "1", "8", "9"]  # type: ignore[attr-defined]
    assert made.told == [(1, counts(3, 0, 1, 1)), (2, counts(3, 0, 1, 1))]  # type: ignore[attr-defined]


def test_a_load_does_not_wait_for_what_is_cut_off(stage: Stage) -> None:
    """The next version waits for the engine to be idle, and the cut makes it so."""
    made = stage("drop", Ticket(0, []), Ticket(1, []), permits=0)

    async def overlapping() -> tuple[pa.Table, pa.Table]:
        first = asyncio.ensure_future(made(chunk(1, LONG, 1, 2)))
        await asyncio.sleep(0.05)
        second = asyncio.ensure_future(made(chunk(2, 1, 1, 1)))
        await asyncio.sleep(0.05)
        made.fake.permits.release(20)  # type: ignore[attr-defined]
        return await asyncio.wait_for(first, WAIT), await asyncio.wait_for(second, WAIT)

    first, second = asyncio.run(overlapping())
    assert uids(first) == ["1-1", "1-2"] and runs(second) == [[(1, 1)]] * 2


def test_cancelled_groups_are_begun_anew_by_a_later_version_and_once(stage: Stage) -> None:
    made = stage("cancel", *(Ticket(version, []) for version in (0, 0, 1, 2)))
    tables = generate(made, chunk(1, 5, 2, 3), chunk(2, 4, 1, 6), chunk(3, LONG, 2, 9), chunk(4, 9, 9, 1))
    assert [uids(table) for table in tables] == [["1-1", "1-2"], ["2-0", "2-1"], ["1-0", "3-1"], ["2-2", "4-0"]]
    anew = tables[2].slice(0, 1)
    assert runs(anew) == [[(1, 5)]] and anew["policy_version"].to_pylist() == [1]
    assert (anew["iteration"].to_pylist(), anew["chunk"].to_pylist()) == ([3], [3]), "it is of the chunk that gives it"
    assert made.told == [  # type: ignore[attr-defined]
        (1, counts(3, 0, 1, 0)),
        (2, counts(3, 0, 1, 0)),  # the same version would say the same again
        (3, counts(2, 1, 1, 0)),
        (4, counts(2, 1, 1, 0)),
    ]
    made = stage("cancel", *(Ticket(version, []) for version in (0, 1, 2)))
    generate(made, chunk(1, LONG, 2, 3), chunk(2, 1, 1, 1), chunk(3, 1, 1, 1))
    assert [own["lost"] for _, own in made.told] == [0, 1, 0], "too slow twice"  # type: ignore[attr-defined]
    assert [own["taken_up"] for _, own in made.told] == [0, 1, 0]  # type: ignore[attr-defined]


def test_carried_groups_go_on_with_the_next_version(stage: Stage) -> None:
    made = stage("carry", Ticket(0, []), Ticket(1, []), n=2, permits=3)

    async def two_iterations() -> tuple[pa.Table, pa.Table]:
        first = await asyncio.wait_for(made(chunk(1, 7, 2, 3)), WAIT)
        following = asyncio.ensure_future(made(chunk(2, 9, 2, 1)))
        await asyncio.sleep(0.05)
        made.fake.permits.release(100)  # type: ignore[attr-defined]
        return first, await asyncio.wait_for(following, WAIT)

    first, second = asyncio.run(two_iterations())
    assert uids(first) == ["1-1"] * 2 + ["1-2"] * 2
    assert uids(second) == ["1-0"] * 2 + ["2-1"] * 2
    # The engine looks for new weights after a step, and may be in the fourth one by then.
    for (version, old), (newer, new) in runs(second)[:2]:
        assert (version, newer, old + new) == (0, 1, 7) and old in (3, 4)
    assert set(second["iteration"].to_pylist()) == {2} and set(second["chunk"].to_pylist()) == {2}
    assert staleness(second).tolist() == [1, 1, 0, 0]
    assert not made.fake.aborted and made.fake.resets  # type: ignore[attr-defined]
    assert [own for _, own in made.told] == [counts(3, 0, 1, 0), counts(2, 1, 1, 0)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("on_stale", ["drop", "correct"])
def test_what_would_be_too_old_is_given_up_unless_it_is_corrected(stage: Stage, on_stale: str) -> None:
    made = stage("carry", Ticket(0, []), Ticket(2, []), bound=1, on_stale=on_stale, permits=3)

    async def two_iterations() -> pa.Table:
        await asyncio.wait_for(made(chunk(1, 40, 2, 3)), WAIT)
        following = asyncio.ensure_future(made(chunk(3, 90, 90, 2)))
        await asyncio.sleep(0.05)
        made.fake.permits.release(1000)  # type: ignore[attr-defined]
        return await asyncio.wait_for(following, WAIT)

    table = asyncio.run(two_iterations())
    if on_stale == "drop":
        assert "1-0" not in uids(table) and staleness(table).tolist() == [0, 0]
        assert made.fake.aborted == ["0"]  # type: ignore[attr-defined]
        assert made.told[1] == (3, counts(3, 0, 1, 1))  # type: ignore[attr-defined]
    else:
        assert uids(table)[0] == "1-0" and staleness(table).tolist() == [2, 0]
        assert made.told[1] == (3, counts(2, 1, 1, 0))  # type: ignore[attr-defined]


def test_validation_is_whole(stage: Stage) -> None:
    made = stage("drop")
    (table,) = generate(made, chunk(0, 9, 2, 3, split="val"))
    assert sorted(set(uids(table))) == ["0-0", "0-1", "0-2"] and not made.told  # type: ignore[attr-defined]


def test_a_request_that_cannot_be_added_fails_its_chunk_and_leaves_the_engine_idle(stage: Stage) -> None:
    made = stage("drop", Ticket(0, []), Ticket(1, []), permits=3)
    made.fake.bad = [7]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="prompt is bad"):
        generate(made, chunk(1, 7, LONG, LONG))
    made.fake.permits.release(1000)  # type: ignore[attr-defined]
    (table,) = generate(made, chunk(2, 1, 2, LONG))
    assert uids(table) == ["2-0", "2-1"] and table["policy_version"].to_pylist() == [1, 1]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    policy=st.sampled_from(["drop", "cancel", "carry"]),
    lengths=st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=8),
    together=st.integers(1, 4),
)
def test_every_chunk_gives_as_many_groups_and_none_twice(
    stage: Stage, policy: str, lengths: list[tuple[int, ...]], together: int
) -> None:
    versions = [number // together for number in range(len(lengths))]
    made = stage(policy, *(Ticket(version, []) for version in versions), bound=2)
    made.fake.STEP_S = 0.0  # type: ignore[attr-defined]

    async def all_of_them() -> list[pa.Table]:
        found = []
        for first in range(0, len(lengths), together):
            tables = [
                chunk(number, *lengths[number], iteration=versions[number] + 1)
                for number in range(first, min(first + together, len(lengths)))
            ]
            found += await asyncio.wait_for(asyncio.gather(*map(made, tables)), WAIT)
        return found

    found = asyncio.run(all_of_them())
    made.engine.close()
    assert [len(table) for table in found] == [2] * len(lengths)
    for number, table in enumerate(found):
        assert set(table["chunk"].to_pylist()) == {number}
        assert all(0 <= age <= 2 * (policy == "carry") for age in staleness(table))
    given_out = [uid for table in found for uid in uids(table)]
    assert len(given_out) == len(set(given_out))
    told = [own for _, own in made.told]  # type: ignore[attr-defined]
    assert all(own["begun"] + own["taken_up"] - own["cut_off"] == 2 for own in told)
    assert sum(own["lost"] for own in told) + len(made._oversampling._held) == sum(
        own["cut_off"] - own["taken_up"] for own in told
    ), "every group that was cut off is lost, taken up again, or held"
    # What is held does not grow from iteration to iteration.
    assert len(made._oversampling._held) <= 2 * together
