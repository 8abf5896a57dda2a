"""The account of prompts that changed chunks."""

import asyncio
import json
from typing import Any

import pyarrow as pa
import pytest

from pipeline.admission import Admission
from pipeline.first_come_store import FirstComeStore
from pipeline.rows import PROMPT
from pipeline.store import StaleGeneration
from pipeline.stores import store_of
from tests.rollout.test_oversample import chunk
from tests.test_checks import good
from tests.test_published import part

GOING_ON = (1, 6, {"orders": {"a": [0, 3]}})


def prompts(*uids: str) -> pa.Table:
    """Prompts of other chunks, in a chunk whose number does not matter."""
    whole = pa.concat_tables([chunk(int(uid.split("-")[0]), *[5] * 3) for uid in uids])
    return pa.concat_tables([whole.slice(3 * place + int(uid[-1]), 1) for place, uid in enumerate(uids)])


def uids(table: pa.Table | None) -> list[str] | None:
    return table and table["uid"].to_pylist()


async def begun(base: int = 0, start: Any = (0, 0)) -> tuple[FirstComeStore, int]:
    """A store whose iterations have two chunks of two prompts."""
    store = FirstComeStore(Admission(2, 4, 1))
    generation = await store.new_generation()
    await store.begin(generation, base, 1, start)
    await store.publish(generation, base, part(), 0.0)
    return store, generation


async def admitted(store: FirstComeStore, generation: int, number: int, engine: str = "") -> list[str] | None:
    return uids((await store.admit(generation, number, 1.0, engine)).prompts)


async def running(engine: str = "a") -> tuple[FirstComeStore, int]:
    """A store of whose chunks an engine has the first four."""
    store, generation = await begun()
    for number in range(4):
        ticket = await store.admit(generation, number, 1.0, engine)
        assert ticket.prompts is None and not ticket.again
    return store, generation


def test_a_chunk_is_admitted_with_what_it_holds() -> None:
    async def run() -> None:
        store, generation = await running()
        await store.exchanged(generation, "a", {1: prompts("1-0", "2-1"), 2: prompts("2-0", "1-1")})
        assert [await admitted(store, generation, number) for number in range(4)] == [
            *(None, ["1-0", "2-1"], ["2-0", "1-1"], None)
        ]
        # What is trained is generated no more.
        await store.publish(generation, 1, part(), 0.0)
        await store.exchanged(generation, "a", {2: prompts("2-0", "3-0"), 3: prompts("1-1", "3-1")})
        await store.admit(generation, 4, 1.0, "a")
        assert [uids(held) for held in store._held.values()] == [["2-0", "3-0"], ["1-1", "3-1"]]
        assert len(store._engine_of) == 3

    asyncio.run(run())


@pytest.mark.parametrize("engine", ["a", "b"])
def test_a_chunk_that_is_begun_again_changes_no_more(engine: str) -> None:
    """By another engine; or by the same one, where Ray lost the answer and asked again."""

    async def run() -> None:
        store, generation = await running()
        # Who merely waits until an engine may begin, begins nothing.
        assert (await store.admit(generation, 1, 1.0)).again
        await store.exchanged(generation, "a", {1: prompts("1-0", "2-1"), 2: prompts("2-0", "1-1")})
        ticket = await store.admit(generation, 2, 1.0, engine)
        assert ticket.again and uids(ticket.prompts) == ["2-0", "1-1"]
        with pytest.raises(RuntimeError, match="engine a was taken for lost"):
            await store.exchanged(generation, "a", {2: prompts("2-0", "3-0"), 3: prompts("1-1", "3-1")})
        assert await admitted(store, generation, 3) is None
        await store.exchanged(generation, "a", {1: prompts("1-0", "3-1"), 3: prompts("3-0", "2-1")})

    asyncio.run(run())


@pytest.mark.parametrize("state", [(0, 4), GOING_ON])
def test_a_resumed_run_goes_on_with_the_prompts_that_are_not_trained(state: tuple[Any, ...]) -> None:
    async def run() -> None:
        store, generation = await running()
        await store.made(generation, [(1, state, {}), (2, (0, 8), {})])
        assert await store.checkpoint_position(generation, 1) == state
        held = prompts("2-0", "1-1")
        await store.exchanged(generation, "a", {1: prompts("1-0", "2-1"), 2: held})
        position = json.loads(json.dumps(await store.checkpoint_position(generation, 1)))
        assert await store.position(generation, 1) == state, "the source has its own place"

        resumed, generation = await begun(1, position)
        assert await resumed.position(generation, 1) == state
        # Chunks count from 0 again: what was the third one is the first.
        ticket = await resumed.admit(generation, 0, 1.0)
        assert ticket.prompts is not None and ticket.prompts.equals(held) and ticket.prompts.schema == PROMPT
        assert await admitted(resumed, generation, 1) is None
        assert await resumed.checkpoint_position(generation, 1) == (*state[:2], position[2])
        await resumed.made(generation, [(2, (0, 8), {})])
        assert await resumed.checkpoint_position(generation, 2) == (0, 8), "its chunks hold their own"

    asyncio.run(run())


def test_a_stream_that_has_ended_changes_nothing() -> None:
    async def run() -> None:
        store, generation = await running()
        await store.exchanged(generation, "a", {1: prompts("1-0", "2-1"), 2: prompts("2-0", "1-1")})
        now = await store.new_generation()
        with pytest.raises(StaleGeneration):
            await store.exchanged(generation, "a", {1: prompts("1-0", "2-1")})
        await store.begin(now, 0, 1, (0, 0))
        await store.publish(now, 0, part(), 0.0)
        assert await admitted(store, now, 1) is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("overrides", "first_come"),
    [
        ([], False),
        (["algorithm.max_staleness=1"], True),
        (["algorithm.max_staleness=1", "stream.order=kept"], False),
        (["stream.order=first_come"], True),
        (["algorithm.max_staleness=1", "rollout.oversample=0.5"], False),
        (["algorithm.max_staleness=1", "algorithm.filter_groups.enable=true"], False),
    ],
)
def test_which_runs_have_it(overrides: list[str], first_come: bool) -> None:
    assert (store_of(good(*overrides), 5)[0] is FirstComeStore) == first_come
