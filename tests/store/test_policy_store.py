"""The policy store as plain asyncio: no Ray, no tensors."""

import asyncio
import functools
import random
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import FinalError
from pipeline.store.admission import Admission
from pipeline.store.cursor import PromptCursor
from pipeline.store.errors import StaleAttempt, StoreTimeout
from pipeline.store.events import (
    AttemptBegun,
    AttemptFailed,
    CheckpointBegun,
    EventLog,
    IterationTrained,
    PromptScores,
    PromptsMade,
    ValidationScored,
    VersionLoaded,
    milliseconds,
)
from pipeline.store.policy_store import PolicyStore
from pipeline.store.prompt_ledger import PageGrant, PromptBatch
from pipeline.store.status import StoreStatus, TrainerState
from pipeline.store.versions import CRITIC, POLICY, Ticket
from pipeline.weights.load import Shard, checksum

LONG = 30.0
"""Deadline of waits that must not reach it."""

TWO_CHUNKS = Admission(chunk_prompts=2, train_batch_size=4, max_staleness=0)

admissions = st.builds(Admission, st.integers(1, 40), st.integers(1, 200), st.integers(0, 4))


def shard(rank: int, version: int) -> Shard:
    data = f"rank {rank} of version {version}".encode()
    return Shard(rank, [], [data], [zlib.crc32(data)])


async def publish(store: PolicyStore, version: int, world: int = 1, attempt: int = 1) -> list[Shard]:
    shards = [shard(rank, version) for rank in range(world)]
    for part in shards:
        await store.publish(attempt, version, {POLICY: part}, stepped_at=0.0)
    return shards


async def begun(admission: Admission = TWO_CHUNKS, version: int = 0, world: int = 1) -> PolicyStore:
    """A store in attempt 1 whose train loop holds `version`, not yet published; the driver knows that."""
    store = PolicyStore(admission)
    assert await store.new_attempt() == 1
    await store.register_trainer(1, TrainerState(version, PromptCursor(), False), world)
    assert await store.read_events(0, 0.0) == (1, [AttemptBegun(version)])
    return store


async def settle() -> None:
    """Let every task that can go on go on."""
    for _ in range(200):
        await asyncio.sleep(0)


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), LONG))

    return wrapped


# admission


@settings(max_examples=300)
@given(admissions, st.integers(0, 500), st.integers(0, 300))
def test_version_needed_is_the_lowest_that_the_rule_allows(admission: Admission, chunk: int, dropped: int) -> None:
    def rule(version: int) -> bool:
        bound = (version + 1 + admission.max_staleness) * admission.train_batch_size
        return (chunk + 1) * admission.chunk_prompts - dropped <= bound

    version = admission.version_needed(chunk, dropped)
    assert rule(version)
    assert version == 0 or not rule(version - 1)


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.integers(0, 4), st.randoms(use_true_random=False))
@asynchronous
async def test_who_asks_first_does_not_matter(
    chunk_prompts: int, chunks_per_batch: int, staleness: int, base: int, rng: random.Random
) -> None:
    admission = Admission(chunk_prompts, chunk_prompts * chunks_per_batch, staleness)
    chunks = list(range(4 * chunks_per_batch))
    rng.shuffle(chunks)

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


@asynchronous
async def test_dropped_groups_admit_as_many_replacements() -> None:
    store = await begun(Admission(2, 4, 0))
    await publish(store, 0)
    third = asyncio.ensure_future(store.admit(1, 2, LONG))
    await store.report_groups(1, 0, 1)
    await settle()
    assert not third.done()
    await store.report_groups(1, 0, 2)
    assert (await third).version == 0


@asynchronous
async def test_pace_runs_ahead_of_admission_by_the_lookahead() -> None:
    store = await begun(Admission(2, 4, 0))
    third = [asyncio.ensure_future(store.wait_prompts_due(1, 4, lookahead, LONG)) for lookahead in (0, 1, 2)]
    for version, expected in ((0, [False, False, True]), (1, [False, True, True]), (2, [True, True, True])):
        await publish(store, version)
        await settle()
        assert [wait.done() for wait in third] == expected


@asynchronous
async def test_pages_are_granted_at_a_version_of_the_attempt() -> None:
    for base in (0, 3):
        store = await begun(Admission(2, 4, 0, last_iteration=5), version=base)
        first = asyncio.ensure_future(store.grant_page(1, 0, 1, 1, LONG))
        await settle()
        assert not first.done(), "the train loop has begun, and its version is not out"
        await publish(store, base)
        assert await first == PageGrant(base, True, False)
        assert await store.grant_page(1, 1, 3, 1, LONG) == PageGrant(base, False, False)


@asynchronous
async def test_nothing_is_admitted_before_the_train_loop_has_begun() -> None:
    store = PolicyStore(Admission(2, 4, 4))
    attempt = await store.new_attempt()
    first = asyncio.ensure_future(store.admit(attempt, 0, LONG))
    pace = asyncio.ensure_future(store.wait_prompts_due(attempt, 0, 1, LONG))
    start = asyncio.ensure_future(store.trainer_state(attempt, LONG))
    await settle()
    assert not first.done() and not pace.done() and not start.done()
    await store.register_trainer(attempt, TrainerState(7, PromptCursor(2, 5), False), 1)
    assert await start == TrainerState(7, PromptCursor(2, 5), False)
    await settle()
    assert not first.done()
    await publish(store, 7, attempt=attempt)
    await pace
    assert (await first).version == 7


# weights


@asynchronous
async def test_a_version_is_out_when_every_rank_has_published_it() -> None:
    store = await begun(world=3)
    first = asyncio.ensure_future(store.admit(1, 0, LONG))
    for rank in (2, 0, 0):
        await store.publish(1, 0, {POLICY: shard(rank, 0)}, stepped_at=0.0)
        await settle()
        assert not first.done() and store.version == -1
    await store.publish(1, 0, {POLICY: shard(1, 0)}, stepped_at=0.0)
    assert await first == Ticket(0, [shard(rank, 0) for rank in range(3)])


def models(rank: int, version: int) -> dict[str, Shard]:
    """One rank's shards of both trained models."""
    data = f"critic of rank {rank} of version {version}".encode()
    return {POLICY: shard(rank, version), CRITIC: Shard(rank, [], [data], [zlib.crc32(data)])}


def ticket(model: str, version: int, world: int) -> Ticket:
    return Ticket(version, [models(rank, version)[model] for rank in range(world)])


@asynchronous
async def test_weights_of_each_model_wait_for_their_version() -> None:
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


@asynchronous
async def test_a_model_that_nobody_trains() -> None:
    store = await begun()
    await publish(store, 0)
    with pytest.raises(ValueError, match="^the train workers publish no critic; they publish policy$"):
        await store.weights(1, CRITIC, 0, LONG)
    await store.publish(1, 1, models(0, 1), stepped_at=0.0)
    with pytest.raises(ValueError, match="^the train workers publish no reward; they publish critic, policy$"):
        await store.weights(1, "reward", 1, LONG)


@asynchronous
async def test_engines_are_held_to_the_policys_checksum_alone() -> None:
    store = await begun(world=2)
    for rank in range(2):
        await store.publish(1, 0, models(rank, 0), stepped_at=0.0)
    policy, critic = (ticket(model, 0, world=2).shards for model in (POLICY, CRITIC))
    for other in (critic, policy + critic):
        with pytest.raises(FinalError, match="checksum"):
            await store.acknowledge(1, "e0", 0, checksum(other), 0.1, 0.0, 0.0)
    await store.acknowledge(1, "e0", 0, checksum(policy), 0.1, 0.0, 0.0)


@asynchronous
async def test_the_kl_coefficient_of_a_version_outlives_its_weights() -> None:
    store = await begun(world=2)
    for version, kl_coef in enumerate((0.2, 0.3, 0.4)):
        for rank in range(2):
            await store.publish(1, version, models(rank, version), 0.0, kl_coef)
    assert [await store.kl_coef(1, version, 1.0) for version in range(3)] == [0.2, 0.3, 0.4]
    with pytest.raises(StoreTimeout, match="KL coefficient: waited .* for policy version 3"):
        await store.kl_coef(1, 3, 0.01)


@asynchronous
async def test_an_engine_must_have_loaded_what_was_published() -> None:
    store = await begun(world=2)
    shards = await publish(store, 0, world=2)
    with pytest.raises(
        FinalError, match=r"engine e0 loaded version 0 with checksum 00000001, but the published checksum is"
    ):
        await store.acknowledge(1, "e0", 0, 1, 0.5, 0.0, 0.0)
    with pytest.raises(ValueError, match=r"engine e0 acknowledged version 1, .*\(current is 0\)"):
        await store.acknowledge(1, "e0", 1, checksum(shards), 0.5, 0.0, 0.0)
    assert await store.read_events(1, 0.0) == (1, [])
    await store.acknowledge(1, "e0", 0, checksum(shards), 0.5, 0.0, 0.0)
    read, events = await store.read_events(1, 0.0)
    assert events == [VersionLoaded(0, "e0", 0.5, None, 0.0, 0.0)]
    shards = await publish(store, 1, world=2)
    await store.acknowledge(1, "e0", 1, checksum(shards), 0.5, 2.0, 3.0)
    _, (event,) = await store.read_events(read, 0.0)
    assert isinstance(event, VersionLoaded) and event.update_s is not None
    assert event == VersionLoaded(1, "e0", 0.5, event.update_s, 2.0, 3.0)
    assert event.update_s > 1e9  # the optimiser step was in 1970


@pytest.mark.parametrize("staleness", [0, 1, 2])
@asynchronous
async def test_a_version_that_stale_rows_may_use_can_be_acknowledged_late(staleness: int) -> None:
    store = await begun(Admission(2, 4, staleness))
    published = [await publish(store, version) for version in range(staleness + 3)]
    newest = staleness + 2
    assert store.version == newest
    for version in range(newest - staleness, newest + 1):
        await store.acknowledge(1, "e0", version, checksum(published[version]), 0.1, 0.0, 0.0)
        with pytest.raises(FinalError, match="checksum"):
            await store.acknowledge(1, "e0", version, checksum(published[version]) ^ 1, 0.1, 0.0, 0.0)
    with pytest.raises(ValueError, match="version 0, unknown or too new"):
        await store.acknowledge(1, "e0", 0, checksum(published[0]), 0.1, 0.0, 0.0)


@asynchronous
async def test_validation_gets_exactly_its_version() -> None:
    store = await begun()
    await publish(store, 0)
    assert (await store.admit_validation(1, 0, LONG)).version == 0
    later = asyncio.ensure_future(store.admit_validation(1, 1, LONG))
    await settle()
    assert not later.done()
    shards = await publish(store, 1)
    assert await later == Ticket(1, shards)
    with pytest.raises(RuntimeError, match="validation of policy version 0 came too late: current is 1"):
        await store.admit_validation(1, 0, LONG)


# attempts


@asynchronous
async def test_a_new_attempt_fails_every_older_wait_at_once_and_forgets() -> None:
    store = await begun()
    await publish(store, 0)
    await store.report_groups(1, 0, 4)
    await store.end_prompts(1, 3)
    waits = [
        asyncio.ensure_future(wait)
        for wait in (
            store.admit(1, 90, LONG),
            store.admit_validation(1, 9, LONG),
            store.wait_prompts_due(1, 90, 1, LONG),
            store.weights(1, CRITIC, 9, LONG),
        )
    ]
    await settle()
    assert not any(wait.done() for wait in waits)
    assert await store.new_attempt() == 2 == await store.current_attempt()
    for wait in waits:
        with pytest.raises(StaleAttempt, match="attempt 1 of the stream has ended: the train workers rest"):
            await wait
    for call in (
        lambda: store.register_trainer(1, TrainerState(0, PromptCursor(), False), 1),
        lambda: store.trainer_state(1, LONG),
        lambda: store.publish(1, 1, {POLICY: shard(0, 1)}, 0.0),
        lambda: store.acknowledge(1, "e", 0, 0, 0.0, 0.0, 0.0),
        lambda: store.admit(1, 0, LONG),
        lambda: store.weights(1, POLICY, 0, LONG),
        lambda: store.report_groups(1, 0, 1),
        lambda: store.report_prompts(1, []),
        lambda: store.end_of_iteration(1, 1),
        lambda: store.end_prompts(1, 1),
        lambda: store.last_version(1),
        lambda: store.post(1, IterationTrained(1, {})),
    ):
        with pytest.raises(StaleAttempt):
            await call()
    # The numbers start over: nothing is out, nothing dropped, nothing ended.
    await store.register_trainer(2, TrainerState(5, PromptCursor(1, 2), False), 1)
    first = asyncio.ensure_future(store.admit(2, 0, LONG))
    third = asyncio.ensure_future(store.admit(2, 2, LONG))
    await settle()
    assert not first.done() and await store.last_version(2) is None
    await publish(store, 5, attempt=2)
    assert (await first).version == 5
    await settle()
    assert not third.done()
    await publish(store, 6, attempt=2)
    assert (await third).version == 6


# deadlines


@asynchronous
async def test_deadlines_name_phase_version_and_party() -> None:
    store = PolicyStore(Admission(2, 4, 0))
    await store.new_attempt()
    with pytest.raises(StoreTimeout, match="start: waited 0 s for the train loop; the last heartbeat .* the stream"):
        await store.trainer_state(1, 0.02)
    await store.register_trainer(1, TrainerState(0, PromptCursor(), False), 3)
    with pytest.raises(StoreTimeout, match="admission: .* 0 from train ranks 0, 1, 2 .* from the train loop"):
        await store.admit(1, 0, 0.02)
    await publish(store, 0, world=3)
    await store.publish(1, 1, {POLICY: shard(1, 1)}, 0.0)
    for call, phase in (
        (store.admit_validation(1, 1, 0.02), "validation"),
        (store.weights(1, CRITIC, 1, 0.02), CRITIC),
    ):
        with pytest.raises(StoreTimeout, match=f"{phase}.* train ranks 0, 2 .* train rank 1 .publishing version 1"):
            await call
    await store.acknowledge(1, "node:7", 0, checksum([shard(rank, 0) for rank in range(3)]), 0.0, 0.0, 0.0)
    with pytest.raises(StoreTimeout, match="prompts: .* policy version 2 from .* from engine node:7"):
        await store.wait_prompts_due(1, 6, 1, 0.02)


@asynchronous
async def test_a_deadline_counts_from_the_last_heartbeat() -> None:
    store = await begun(Admission(4, 4, 0))
    clock = asyncio.get_running_loop().time
    asked = clock()
    wait = asyncio.ensure_future(store.admit(1, 99, 0.8))
    for version in range(4):
        await asyncio.sleep(0.25)
        assert not wait.done()
        await publish(store, version)
    published = clock()
    with pytest.raises(StoreTimeout, match=r"version 99 .* train rank 0 \(publishing version 3\)"):
        await wait
    assert clock() - asked > 1.0 + 0.8 - 0.05
    assert 0.75 < clock() - published < 5.0


@asynchronous
async def test_work_is_a_heartbeat() -> None:
    store = await begun()
    await asyncio.sleep(0.2)
    await store.beat(1, "engine a:1 (generating)")
    status = await store.status()
    assert status.alive_by == "engine a:1 (generating)" and status.alive_s < 0.2
    with pytest.raises(StaleAttempt):
        await store.beat(0, "an engine of an earlier attempt")


@asynchronous
async def test_a_wait_gets_its_full_time_however_long_the_silence_before() -> None:
    store = await begun()
    await asyncio.sleep(0.6)
    wait = asyncio.ensure_future(store.admit(1, 0, 0.5))
    await asyncio.sleep(0.05)
    assert not wait.done()
    await publish(store, 0)
    assert (await wait).version == 0


@asynchronous
async def test_drops_are_no_heartbeat() -> None:
    store = await begun()
    wait = asyncio.ensure_future(store.admit(1, 99, 0.2))
    for _ in range(100):
        await asyncio.sleep(0.02)
        await store.report_groups(1, 0, 0)
        if wait.done():
            break
    with pytest.raises(StoreTimeout):
        wait.result()


# positions, messages, stop


@asynchronous
async def test_where_prompts_go_on() -> None:
    store = await begun(version=3)
    assert await store.end_of_iteration(1, 3) == await store.begin_of_batch(1, 0) == PromptCursor()
    for iteration in range(4, 9):
        batch = PromptBatch(iteration - 3, PromptCursor(0, iteration * 4), {"made": iteration}, iteration)
        await store.report_prompts(1, [batch])
        await publish(store, iteration)
        assert await store.end_of_iteration(1, iteration) == PromptCursor(0, iteration * 4)
        assert await store.begin_of_batch(1, iteration - 3) == PromptCursor(0, iteration * 4)
    assert await store.end_of_iteration(1, 7) == PromptCursor(0, 28)
    for unknown in (4, 99):
        with pytest.raises(KeyError):
            await store.end_of_iteration(1, unknown)
    assert await store.last_version(1) is None
    await store.end_prompts(1, 9)
    assert await store.last_version(1) == 9
    _, events = await store.read_events(1, 0.0)
    assert events == [PromptsMade(iteration, {"made": iteration}) for iteration in range(4, 9)]


def note(number: int) -> IterationTrained:
    return IterationTrained(number, {})


@asynchronous
async def test_the_event_log_hands_out_each_event_once_in_order() -> None:
    store = await begun()
    for number in range(3):
        await store.post(1, note(number))
    read, events = await store.read_events(1, 0.0)
    assert read == 4 and events == [note(number) for number in range(3)]
    # An answer that got lost can be asked for again; what was confirmed is forgotten.
    assert await store.read_events(1, 0.0) == (4, events)
    assert await store.read_events(2, 0.0) == (4, events[1:])
    await store.post(1, note(3))
    assert await store.read_events(read, 0.0) == (5, [note(3)])
    assert await store.read_events(5, 0.0) == (5, [])
    await store.post(1, note(4))
    assert await store.read_events(0, 0.0) == (6, [note(4)])


@asynchronous
async def test_reading_waits_for_an_event_up_to_the_timeout() -> None:
    store = await begun()
    clock = asyncio.get_running_loop().time
    before = clock()
    assert await store.read_events(1, 0.15) == (1, [])
    assert clock() - before > 0.14
    wait = asyncio.ensure_future(store.read_events(1, LONG))
    await asyncio.sleep(0.02)
    await store.post(1, note(1))
    assert await wait == (2, [note(1)])
    # Events outlive the attempt that sent them.
    await store.post(1, note(2))
    await store.new_attempt()
    assert await store.read_events(2, 0.0) == (3, [note(2)])


@asynchronous
async def test_a_validation_is_over_when_all_its_prompts_are_recorded() -> None:
    store = await begun()
    await store.publish(1, 0, {POLICY: shard(0, 0)}, 0.0, validates=True)
    await store.announce_validation(1, 0, 2)
    over = asyncio.ensure_future(store.wait_validated(1, 0, LONG))
    for uid in "ab":
        await settle()
        assert not over.done() and not await store.is_validated(1, 0)
        scores = PromptScores("math", uid, 1, [1.0], [0])
        await store.record_validation(1, ValidationScored(0, [scores], 0.5))
    await over
    assert await store.is_validated(1, 0) and not await store.is_validated(1, 1)


@asynchronous
async def test_stop_and_status() -> None:
    store = await begun()
    assert not (await store.status()).stopping
    await store.stop()
    waits = [asyncio.ensure_future(store.admit(1, chunk, LONG)) for chunk in range(2)]
    await settle()
    status = await store.status()
    assert status.alive_s < LONG
    assert status == StoreStatus(1, 0, -1, True, {"admission": 2}, status.alive_s, "the train loop")
    await publish(store, 0)
    await asyncio.gather(*waits)
    assert (await store.status()).waiting == {"admission": 0}


# a store that died and was started again


@asynchronous
async def test_a_restarted_store_repeats_no_number_and_loses_no_event() -> None:
    clock = iter((1000, 2000))

    def first() -> int:
        return next(clock)

    old = PolicyStore(TWO_CHUNKS, first)
    attempt = await old.new_attempt()
    await old.register_trainer(attempt, TrainerState(0, PromptCursor(0, 0), False), 1)
    await old.post(attempt, note(1))
    read, messages = await old.read_events(0, 0.0)
    assert messages == [AttemptBegun(0), note(1)]

    new = PolicyStore(TWO_CHUNKS, first)
    # Who knew the old one is told, before a stream is built and after.
    with pytest.raises(StaleAttempt, match="the policy store has restarted, and no stream has been built since"):
        await new.current_attempt()
    for _ in range(2):
        for call in (new.publish(attempt, 1, {POLICY: shard(0, 1)}, 0.0), new.admit(attempt, 0, LONG)):
            with pytest.raises(StaleAttempt):
                await call
        later = await new.new_attempt()
    assert later == await new.current_attempt() > attempt
    await new.register_trainer(later, TrainerState(3, PromptCursor(0, 12), False), 1)
    # The driver asks for what follows the last message of the old one.
    last, messages = await new.read_events(read, 0.0)
    assert messages == [AttemptBegun(3)] and last > read
    assert await new.read_events(last, 0.0) == (last, [])


def test_numbers_of_the_clock_grow() -> None:
    assert 1.6e12 < milliseconds() <= milliseconds()


@asynchronous
async def test_a_checkpoint_waits_until_the_driver_has_recorded_what_it_covers() -> None:
    store = await begun()
    await store.post(1, note(1))
    settled = asyncio.ensure_future(store.flush_events(1, 1, LONG))
    await settle()
    last, messages = await store.read_events(1, 1.0)
    assert messages == [note(1), CheckpointBegun(1)]
    # Read is not recorded: the next question of the driver says so.
    await asyncio.sleep(3 * EventLog.PAUSE_S)
    assert not settled.done()
    await store.read_events(last - 1, 0.0)
    await asyncio.sleep(3 * EventLog.PAUSE_S)
    assert not settled.done()
    await store.read_events(last, 0.0)
    await settled
    with pytest.raises(StoreTimeout, match="checkpoint: not saved, the driver did not record iteration 2 within 0 s"):
        await store.flush_events(1, 2, 0.1)
    with pytest.raises(StaleAttempt):
        await store.flush_events(0, 2, 0.1)


@asynchronous
async def test_a_failure_is_told_whatever_the_attempt() -> None:
    store = await begun()
    await store.report_failure("train rank 1 died")
    assert await store.read_events(1, 0.0) == (2, [AttemptFailed("train rank 1 died")])
