"""The policy store as plain asyncio: no Ray, no tensors."""

import asyncio
import random
import re
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.admission import Admission
from pipeline.errors import FinalError
from pipeline.mailbox import Mailbox
from pipeline.rollout.weights import Shard, checksum
from pipeline.store import CRITIC, POLICY, PolicyStore, StaleGeneration, StoreTimeout, Ticket, milliseconds

LONG = 30.0
"""Deadline of waits that must not reach it."""

TWO_CHUNKS = Admission(chunk_prompts=2, train_batch_size=4, max_staleness=0)

admissions = st.builds(Admission, st.integers(1, 40), st.integers(1, 200), st.integers(0, 4))


def shard(rank: int, version: int) -> Shard:
    data = f"rank {rank} of version {version}".encode()
    return Shard(rank, [], [data], [zlib.crc32(data)])


async def publish(store: PolicyStore, version: int, world: int = 1, generation: int = 1) -> list[Shard]:
    shards = [shard(rank, version) for rank in range(world)]
    for part in shards:
        await store.publish(generation, version, {POLICY: part}, stepped_at=0.0)
    return shards


async def begun(admission: Admission = TWO_CHUNKS, version: int = 0, world: int = 1) -> PolicyStore:
    """A store in generation 1 whose train loop holds `version`, not yet published; the driver knows that."""
    store = PolicyStore(admission)
    assert await store.new_generation() == 1
    await store.begin(1, version, world, (0, 0))
    assert await store.read(0, 0.0) == (1, [{"kind": "begun", "version": version}])
    return store


async def settle() -> None:
    """Let every task that can go on go on."""
    for _ in range(200):
        await asyncio.sleep(0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), LONG))


# admission


@settings(max_examples=300, deadline=None)
@given(admissions, st.integers(0, 500), st.integers(0, 300))
def test_version_needed_is_the_lowest_that_the_rule_allows(admission: Admission, chunk: int, dropped: int) -> None:
    def rule(version: int) -> bool:
        bound = (version + 1 + admission.max_staleness) * admission.train_batch_size
        return (chunk + 1) * admission.chunk_prompts - dropped <= bound

    version = admission.version_needed(chunk, dropped)
    assert rule(version)
    assert version == 0 or not rule(version - 1)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.integers(0, 4), st.randoms(use_true_random=False))
def test_who_asks_first_does_not_matter(
    chunk_prompts: int, chunks_per_batch: int, staleness: int, base: int, rng: random.Random
) -> None:
    admission = Admission(chunk_prompts, chunk_prompts * chunks_per_batch, staleness)
    chunks = list(range(4 * chunks_per_batch))
    rng.shuffle(chunks)

    async def test() -> None:
        store = await begun(admission, version=base)
        waits = {chunk: asyncio.ensure_future(store.admit(1, chunk, LONG)) for chunk in chunks}
        await settle()
        assert not any(wait.done() for wait in waits.values())
        for version in range(base, base + 4):
            await publish(store, version)
            await settle()
            done = {chunk for chunk, wait in waits.items() if wait.done()}
            assert done == {
                chunk
                for chunk in chunks
                if (chunk + 1) * chunk_prompts <= (version - base + 1 + staleness) * admission.train_batch_size
            }
        for chunk, wait in waits.items():
            # Each got the version that was current when its turn came: as fresh as the rule allows, and no fresher.
            assert (await wait).version == base + max(0, chunk // chunks_per_batch - staleness)

    run(test)


def test_dropped_groups_admit_as_many_replacements() -> None:
    async def test() -> None:
        store = await begun(Admission(2, 4, 0))
        await publish(store, 0)
        third = asyncio.ensure_future(store.admit(1, 2, LONG))
        await store.drop(1, 1)
        await settle()
        assert not third.done()
        await store.drop(1, 1)
        assert (await third).version == 0

    run(test)


def test_pace_runs_ahead_of_admission_by_the_lookahead() -> None:
    async def test() -> None:
        store = await begun(Admission(2, 4, 0))
        third = [asyncio.ensure_future(store.pace(1, 4, lookahead, LONG)) for lookahead in (0, 1, 2)]
        for version, expected in ((0, [False, False, True]), (1, [False, True, True]), (2, [True, True, True])):
            await publish(store, version)
            await settle()
            assert [wait.done() for wait in third] == expected

    run(test)


def test_nothing_is_admitted_before_the_train_loop_has_begun() -> None:
    async def test() -> None:
        store = PolicyStore(Admission(2, 4, 4))
        generation = await store.new_generation()
        first = asyncio.ensure_future(store.admit(generation, 0, LONG))
        pace = asyncio.ensure_future(store.pace(generation, 0, 1, LONG))
        start = asyncio.ensure_future(store.start(generation, LONG))
        await settle()
        assert not first.done() and not pace.done() and not start.done()
        await store.begin(generation, 7, 1, (2, 5))
        assert await start == (7, (2, 5))
        await settle()
        assert not first.done()
        await publish(store, 7, generation=generation)
        await pace
        assert (await first).version == 7

    run(test)


# weights


def test_a_version_is_out_when_every_rank_has_published_it() -> None:
    async def test() -> None:
        store = await begun(world=3)
        first = asyncio.ensure_future(store.admit(1, 0, LONG))
        for rank in (2, 0, 0):
            await store.publish(1, 0, {POLICY: shard(rank, 0)}, stepped_at=0.0)
            await settle()
            assert not first.done() and store.version == -1
        await store.publish(1, 0, {POLICY: shard(1, 0)}, stepped_at=0.0)
        assert await first == Ticket(0, [shard(rank, 0) for rank in range(3)])

    run(test)


def models(rank: int, version: int) -> dict[str, Shard]:
    """One rank's shards of both trained models."""
    data = f"critic of rank {rank} of version {version}".encode()
    return {POLICY: shard(rank, version), CRITIC: Shard(rank, [], [data], [zlib.crc32(data)])}


def ticket(model: str, version: int, world: int, kl_coef: float = 0.0) -> Ticket:
    return Ticket(version, [models(rank, version)[model] for rank in range(world)], kl_coef)


def test_weights_of_each_model_wait_for_their_version() -> None:
    async def test() -> None:
        store = await begun(world=2)
        for version in range(2):
            waits = {model: asyncio.ensure_future(store.weights(1, model, version, LONG)) for model in (POLICY, CRITIC)}
            # Ranks come in any order; the shards are those of ranks 0, 1 in this order.
            for rank in (1, 0):
                await settle()
                assert not any(wait.done() for wait in waits.values()) and store.version == version - 1
                await store.publish(1, version, models(rank, version), stepped_at=0.0)
            for model, wait in waits.items():
                assert await wait == ticket(model, version, world=2)
        # A replica that is late gets the current version, and never a mixture.
        assert await store.weights(1, CRITIC, 0, LONG) == ticket(CRITIC, 1, world=2)
        assert await store.admit(1, 0, LONG) == ticket(POLICY, 1, world=2)

    run(test)


def test_a_half_published_version_is_nobodys() -> None:
    async def test() -> None:
        store = await begun(world=2)
        for rank in range(2):
            await store.publish(1, 0, models(rank, 0), stepped_at=0.0)
        await store.publish(1, 1, models(1, 1), stepped_at=0.0)
        assert await store.weights(1, CRITIC, 0, LONG) == ticket(CRITIC, 0, world=2)
        assert await store.admit(1, 0, LONG) == ticket(POLICY, 0, world=2)

    run(test)


def test_a_model_that_nobody_trains() -> None:
    async def test() -> None:
        store = await begun()
        await publish(store, 0)
        with pytest.raises(ValueError, match="^the train workers publish no critic; they publish policy$"):
            await store.weights(1, CRITIC, 0, LONG)
        await store.publish(1, 1, models(0, 1), stepped_at=0.0)
        with pytest.raises(ValueError, match="^the train workers publish no reward; they publish critic, policy$"):
            await store.weights(1, "reward", 1, LONG)

    run(test)


def test_engines_are_held_to_the_policys_checksum_alone() -> None:
    async def test() -> None:
        store = await begun(world=2)
        for rank in range(2):
            await store.publish(1, 0, models(rank, 0), stepped_at=0.0)
        policy, critic = (ticket(model, 0, world=2).shards for model in (POLICY, CRITIC))
        for other in (critic, policy + critic):
            with pytest.raises(FinalError, match="checksum"):
                await store.acknowledge(1, "e0", 0, checksum(other), load_s=0.1)
        await store.acknowledge(1, "e0", 0, checksum(policy), load_s=0.1)

    run(test)


def test_the_kl_coefficient_travels_with_its_version() -> None:
    async def test() -> None:
        store = await begun(world=2)
        for version, kl_coef in enumerate((0.2, 0.3)):
            for rank in range(2):
                await store.publish(1, version, models(rank, version), 0.0, kl_coef)
            assert await store.admit(1, 2 * version, LONG) == ticket(POLICY, version, 2, kl_coef)
            assert await store.admit_validation(1, version, LONG) == ticket(POLICY, version, 2, kl_coef)
            assert await store.weights(1, CRITIC, version, LONG) == ticket(CRITIC, version, 2, kl_coef)
        # Half of the next version is there: its coefficient is not in force yet.
        await store.publish(1, 2, models(0, 2), 0.0, 0.4)
        assert (await store.admit(1, 0, LONG)).kl_coef == 0.3

    run(test)


def test_an_engine_must_have_loaded_what_was_published() -> None:
    async def test() -> None:
        store = await begun(world=2)
        shards = await publish(store, 0, world=2)
        with pytest.raises(FinalError, match=r"engine e0 loaded version 0 with checksum 00000001, published was"):
            await store.acknowledge(1, "e0", 0, 1, load_s=0.5)
        with pytest.raises(ValueError, match=r"engine e0 acknowledged version 1, .*\(current is 0\)"):
            await store.acknowledge(1, "e0", 1, checksum(shards), load_s=0.5)
        assert await store.read(1, 0.0) == (1, [])
        await store.acknowledge(1, "e0", 0, checksum(shards), load_s=0.5)
        read, [message] = await store.read(1, 0.0)
        known = {"kind": "loaded", "engine": "e0", "load_s": 0.5}
        assert message == known | {"version": 0, "update_s": None, "idle_s": 0.0, "busy_s": 0.0}
        shards = await publish(store, 1, world=2)
        since_step = await store.acknowledge(1, "e0", 1, checksum(shards), load_s=0.5, idle_s=2.0, busy_s=3.0)
        _, [message] = await store.read(read, 0.0)
        assert message == known | {"version": 1, "update_s": since_step, "idle_s": 2.0, "busy_s": 3.0}
        assert since_step > 1e9  # the optimiser step was in 1970

    run(test)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_version_that_stale_rows_may_use_can_be_acknowledged_late(staleness: int) -> None:
    async def test() -> None:
        store = await begun(Admission(2, 4, staleness))
        published = [await publish(store, version) for version in range(staleness + 3)]
        newest = staleness + 2
        assert store.version == newest
        for version in range(newest - staleness, newest + 1):
            await store.acknowledge(1, "e0", version, checksum(published[version]), load_s=0.1)
            with pytest.raises(FinalError, match="checksum"):
                await store.acknowledge(1, "e0", version, checksum(published[version]) ^ 1, load_s=0.1)
        with pytest.raises(ValueError, match="version 0, which nobody may use"):
            await store.acknowledge(1, "e0", 0, checksum(published[0]), load_s=0.1)

    run(test)


def test_old_versions_are_let_go() -> None:
    async def test() -> None:
        store = await begun(Admission(2, 4, 1))
        for version in range(50):
            await store.publish(1, version, models(0, version), stepped_at=0.0)
        held = [entry for entry in store._versions._published.values() if entry.shards]
        assert len(held) == 1 and len(store._versions) <= 4

    run(test)


def test_validation_gets_exactly_its_version() -> None:
    async def test() -> None:
        store = await begun()
        await publish(store, 0)
        assert (await store.admit_validation(1, 0, LONG)).version == 0
        later = asyncio.ensure_future(store.admit_validation(1, 1, LONG))
        await settle()
        assert not later.done()
        shards = await publish(store, 1)
        assert await later == Ticket(1, shards)
        with pytest.raises(RuntimeError, match="validation of policy version 0 came too late: version 1 is out"):
            await store.admit_validation(1, 0, LONG)

    run(test)


# generations


def test_a_new_generation_fails_every_older_wait_at_once_and_forgets() -> None:
    async def test() -> None:
        store = await begun()
        await publish(store, 0)
        await store.drop(1, 4)
        await store.end(1, 3)
        waits = [
            asyncio.ensure_future(wait)
            for wait in (
                store.admit(1, 90, LONG),
                store.admit_validation(1, 9, LONG),
                store.pace(1, 90, 1, LONG),
                store.weights(1, CRITIC, 9, LONG),
            )
        ]
        await settle()
        assert not any(wait.done() for wait in waits)
        assert await store.new_generation() == 2 == await store.current()
        for wait in waits:
            with pytest.raises(StaleGeneration, match="generation 1 of the stream has ended: the train workers rest"):
                await wait
        for call in (
            lambda: store.begin(1, 0, 1, None),
            lambda: store.start(1, LONG),
            lambda: store.publish(1, 1, {POLICY: shard(0, 1)}, 0.0),
            lambda: store.acknowledge(1, "e", 0, 0, 0.0),
            lambda: store.admit(1, 0, LONG),
            lambda: store.weights(1, POLICY, 0, LONG),
            lambda: store.drop(1, 1),
            lambda: store.made(1, [(1, None, {})]),
            lambda: store.position(1, 1),
            lambda: store.end(1, 1),
            lambda: store.ended(1),
            lambda: store.post(1, "kind", {}),
        ):
            with pytest.raises(StaleGeneration):
                await call()
        # The numbers start over: nothing is out, nothing dropped, nothing ended.
        await store.begin(2, 5, 1, (1, 2))
        first = asyncio.ensure_future(store.admit(2, 0, LONG))
        third = asyncio.ensure_future(store.admit(2, 2, LONG))
        await settle()
        assert not first.done() and await store.ended(2) is None
        await publish(store, 5, generation=2)
        assert (await first).version == 5
        await settle()
        assert not third.done()
        await publish(store, 6, generation=2)
        assert (await third).version == 6

    run(test)


# deadlines


def sentence(error: pytest.ExceptionInfo[StoreTimeout]) -> str:
    return re.sub(r"\b0 s\b", "N s", str(error.value))


def test_deadlines_name_phase_version_and_party() -> None:
    async def test() -> None:
        store = PolicyStore(Admission(2, 4, 0))
        await store.new_generation()
        with pytest.raises(StoreTimeout) as error:
            await store.start(1, 0.02)
        life = "the last sign of life came N s ago from"
        assert sentence(error) == f"start: waited N s for the train loop's first message; {life} the stream"

        await store.begin(1, 0, 3, None)
        with pytest.raises(StoreTimeout) as error:
            await store.admit(1, 0, 0.02)
        assert sentence(error) == (
            "admission: waited N s for policy version 0 from train ranks 0, 1, 2 (current is -1); "
            f"{life} the train loop"
        )
        await publish(store, 0, world=3)
        await store.publish(1, 1, {POLICY: shard(1, 1)}, 0.0)
        with pytest.raises(StoreTimeout) as error:
            await store.admit_validation(1, 1, 0.02)
        assert sentence(error) == (
            "validation: waited N s for policy version 1 from train ranks 0, 2 (current is 0); "
            f"{life} train rank 1 (publishing version 1)"
        )
        with pytest.raises(StoreTimeout) as error:
            await store.weights(1, CRITIC, 1, 0.02)
        assert sentence(error) == (
            "critic weights: waited N s for policy version 1 from train ranks 0, 2 (current is 0); "
            f"{life} train rank 1 (publishing version 1)"
        )
        await store.acknowledge(1, "node:7", 0, checksum([shard(rank, 0) for rank in range(3)]), 0.0)
        with pytest.raises(StoreTimeout) as error:
            await store.pace(1, 6, 1, 0.02)
        assert sentence(error) == (
            f"pace: waited N s for policy version 2 from train ranks 0, 1, 2 (current is 0); {life} engine node:7"
        )

    run(test)


def test_a_deadline_counts_from_the_last_sign_of_life() -> None:
    async def test() -> None:
        store = await begun(Admission(4, 4, 0))
        clock = asyncio.get_running_loop().time
        asked = clock()
        wait = asyncio.ensure_future(store.admit(1, 99, 0.3))
        for version in range(4):
            await asyncio.sleep(0.15)
            assert not wait.done()
            await publish(store, version)
        published = clock()
        with pytest.raises(StoreTimeout, match=r"version 99 .* train rank 0 \(publishing version 3\)"):
            await wait
        assert clock() - asked > 0.6 + 0.3 - 0.05
        assert 0.25 < clock() - published < 5.0

    run(test)


def test_a_wait_gets_its_full_time_however_long_the_silence_before() -> None:
    async def test() -> None:
        store = await begun()
        await asyncio.sleep(0.3)
        wait = asyncio.ensure_future(store.admit(1, 0, 0.25))
        await asyncio.sleep(0.05)
        assert not wait.done()
        await publish(store, 0)
        assert (await wait).version == 0

    run(test)


def test_drops_are_no_sign_of_life() -> None:
    async def test() -> None:
        store = await begun()
        wait = asyncio.ensure_future(store.admit(1, 99, 0.2))
        for _ in range(100):
            await asyncio.sleep(0.02)
            await store.drop(1, 0)
            if wait.done():
                break
        with pytest.raises(StoreTimeout):
            wait.result()

    run(test)


# positions, messages, stop


def test_positions() -> None:
    async def test() -> None:
        store = await begun(version=3)
        assert await store.position(1, 3) == (0, 0)  # where `begin` said
        for iteration in range(4, 9):
            await store.made(1, [(iteration, (0, iteration * 4), {})])
            await publish(store, iteration)
            assert await store.position(1, iteration) == (0, iteration * 4)
        assert await store.position(1, 7) == (0, 28)
        for unknown in (4, 99):
            with pytest.raises(KeyError):
                await store.position(1, unknown)
        assert await store.ended(1) is None
        await store.end(1, 9)
        assert await store.ended(1) == 9

    run(test)


def test_the_mailbox_hands_out_each_message_once_in_order() -> None:
    async def test() -> None:
        store = await begun()
        for number in range(3):
            await store.post(1, "note", {"number": number})
        read, messages = await store.read(1, 0.0)
        assert read == 4
        assert messages == [{"kind": "note", "number": number} for number in range(3)]
        # An answer that got lost can be asked for again; what was confirmed is forgotten.
        assert await store.read(1, 0.0) == (4, messages)
        assert await store.read(2, 0.0) == (4, messages[1:])
        await store.post(1, "note", {"number": 3})
        assert await store.read(read, 0.0) == (5, [{"kind": "note", "number": 3}])
        assert await store.read(5, 0.0) == (5, [])
        await store.post(1, "note", {"number": 4})
        assert await store.read(0, 0.0) == (6, [{"kind": "note", "number": 4}])

    run(test)


def test_reading_waits_for_a_message_up_to_the_timeout() -> None:
    async def test() -> None:
        store = await begun()
        clock = asyncio.get_running_loop().time
        before = clock()
        assert await store.read(1, 0.15) == (1, [])
        assert clock() - before > 0.14
        wait = asyncio.ensure_future(store.read(1, LONG))
        await asyncio.sleep(0.02)
        await store.post(1, "note", {})
        assert await wait == (2, [{"kind": "note"}])
        # Messages outlive the generation that sent them.
        await store.post(1, "last", {})
        await store.new_generation()
        assert await store.read(2, 0.0) == (3, [{"kind": "last"}])

    run(test)


def test_stop_and_status() -> None:
    async def test() -> None:
        store = await begun()
        assert not await store.should_stop()
        await store.stop()
        assert await store.should_stop()
        waits = [asyncio.ensure_future(store.admit(1, chunk, LONG)) for chunk in range(2)]
        await settle()
        status = await store.status()
        assert status.pop("alive_s") < LONG
        assert status == {
            "generation": 1,
            "base": 0,
            "version": -1,
            "stopping": True,
            "waiting": {"admission": 2},
            "alive_by": "the train loop",
        }
        await publish(store, 0)
        await asyncio.gather(*waits)
        assert (await store.status())["waiting"] == {"admission": 0}

    run(test)


# a store that died and was started again


def test_a_restarted_store_repeats_no_number_and_loses_no_message() -> None:
    async def test() -> None:
        clock = iter((1000, 2000))

        def first() -> int:
            return next(clock)

        old = PolicyStore(TWO_CHUNKS, first)
        generation = await old.new_generation()
        await old.begin(generation, 0, 1, (0, 0))
        await old.post(generation, "note", {"number": 1})
        read, messages = await old.read(0, 0.0)
        assert [message["kind"] for message in messages] == ["begun", "note"]

        new = PolicyStore(TWO_CHUNKS, first)
        # Who knew the old one is told, before a stream is built and after.
        with pytest.raises(StaleGeneration, match="the policy store has restarted, and no stream has been built since"):
            await new.current()
        for _ in range(2):
            for call in (new.publish(generation, 1, {POLICY: shard(0, 1)}, 0.0), new.admit(generation, 0, LONG)):
                with pytest.raises(StaleGeneration):
                    await call
            later = await new.new_generation()
        assert later == await new.current() > generation
        await new.begin(later, 3, 1, (0, 12))
        # The driver asks for what follows the last message of the old one.
        last, messages = await new.read(read, 0.0)
        assert messages == [{"kind": "begun", "version": 3}] and last > read
        assert await new.read(last, 0.0) == (last, [])

    run(test)


def test_numbers_of_the_clock_grow() -> None:
    assert 1.6e12 < milliseconds() <= milliseconds()


def test_a_checkpoint_waits_until_the_driver_has_recorded_what_it_covers() -> None:
    async def test() -> None:
        store = await begun()
        await store.post(1, "iteration", {"iteration": 1})
        settled = asyncio.ensure_future(store.settle(1, 1, LONG))
        await settle()
        last, messages = await store.read(1, 1.0)
        assert [message["kind"] for message in messages] == ["iteration", "saving"] and messages[1]["version"] == 1
        # Read is not recorded: the next question of the driver says so.
        await asyncio.sleep(3 * Mailbox.PAUSE_S)
        assert not settled.done()
        await store.read(last - 1, 0.0)
        await asyncio.sleep(3 * Mailbox.PAUSE_S)
        assert not settled.done()
        await store.read(last, 0.0)
        await settled
        with pytest.raises(StoreTimeout, match="checkpoint: the driver did not record iteration 2 within 0 s"):
            await store.settle(1, 2, 0.1)
        with pytest.raises(StaleGeneration):
            await store.settle(0, 2, 0.1)

    run(test)


def test_a_failure_is_told_whatever_the_generation() -> None:
    async def test() -> None:
        store = await begun()
        await store.failed("train rank 1 died")
        assert await store.read(1, 0.0) == (2, [{"kind": "failed", "reason": "train rank 1 died"}])

    run(test)
