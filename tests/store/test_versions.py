"""Which version is the current one: the order of publications, and validations that hold it up."""

import asyncio

import pytest

from pipeline.store.admission import Admission
from pipeline.store.cursor import PromptCursor
from pipeline.store.errors import StoreTimeout
from pipeline.store.events import PromptScores, ValidationAnnounced, ValidationScored
from pipeline.store.policy_store import PolicyStore
from pipeline.store.status import TrainerState
from pipeline.store.versions import POLICY, Versions
from pipeline.weights.load import Shard

LONG = 30.0


def part(rank: int = 0) -> dict[str, Shard]:
    return {POLICY: Shard(rank, [], [], [])}


def versions(ranks: int = 1, max_staleness: int = 2) -> Versions:
    made = Versions(max_staleness)
    made.world_size = ranks
    return made


def publish(made: Versions, version: int, validates: bool = False, ranks: int = 1) -> int:
    """The version that is current then."""
    for rank in range(ranks):
        made.publish(version, part(rank), 0.0, float(version), validates)
    return made.current


def test_a_version_is_current_when_all_ranks_have_published_it() -> None:
    made = versions(ranks=2)
    made.publish(4, part(0), 0.0, 0.0, False)
    assert made.current == -1 and "policy version 4 from train rank 1" in made.needs(4)
    made.publish(4, part(1), 0.0, 0.0, False)
    assert made.current == 4 and made.ticket(POLICY).version == 4
    # One rank is ahead of the other.
    made.publish(5, part(0), 0.0, 0.0, False)
    assert made.current == 4 and publish(made, 5, ranks=2) == 5


def test_a_version_stays_current_until_its_validation_is_recorded() -> None:
    made = versions()
    assert publish(made, 0) == 0
    assert publish(made, 1, validates=True) == 1
    assert [publish(made, version) for version in (2, 3)] == [1, 1]
    assert made.needs(2) == "policy version 2, which follows when version 1 has been validated"
    assert "from train rank 0" in made.needs(4)
    made.announce(1, 3)
    made.record(1, ["a", "b"])
    made.record(1, ["b"])  # a task that was repeated
    assert made.current == 1
    made.record(1, ["c"])
    assert made.current == 3, "all that have waited"


def test_versions_that_wait_keep_their_weights_and_their_own_validations() -> None:
    made = versions()
    publish(made, 0, validates=True)
    for version in (1, 2, 3):
        publish(made, version, validates=version == 2)
    made.record(0, ["a"])  # told before how many there are
    made.announce(0, 1)
    assert made.current == 2, "the next one that is to be validated, past those that are not"
    ticket = made.ticket(POLICY)
    assert (ticket.version, made.kl_coef(2), len(ticket.shards)) == (2, 2.0, 1)
    made.announce(2, 1)
    made.record(2, ["a"])
    assert made.current == 3
    assert [bool(made.get(v).shards) for v in (0, 1, 2, 3)] == [False, False, False, True]  # type: ignore[union-attr]


def test_a_validation_that_is_not_made_holds_nothing_up() -> None:
    made = versions()
    publish(made, 7, validates=True)  # what a resumed run begins with was validated before
    assert publish(made, 8) == 7
    made.announce(7, 0)
    assert made.current == 8


def test_little_is_kept_of_old_versions() -> None:
    made = versions(max_staleness=1)
    for version in range(100):
        publish(made, version, validates=version % 3 == 0)
        made.announce(version, 1)
        made.record(version, ["a"])
    assert made.current == 99 and len(made._published) <= 4
    assert made.get(98) is not None and made.get(90) is None
    assert len(made._validations) <= 2


# in the store


def scored(version: int, uid: str) -> ValidationScored:
    return ValidationScored(version, [PromptScores("math", uid, 1, [1.0], [0])], 0.1)


async def begun(max_staleness: int) -> PolicyStore:
    store = PolicyStore(Admission(2, 4, max_staleness))
    await store.new_attempt()
    await store.register_trainer(1, TrainerState(0, PromptCursor(), False), 1)
    return store


async def out(store: PolicyStore, version: int, validates: bool = False) -> None:
    await store.publish(1, version, part(), 0.0, 0.0, validates)


def test_chunks_wait_behind_a_validation_and_start_with_the_newest_version() -> None:
    async def run() -> None:
        store = await begun(max_staleness=1)
        await out(store, 0)
        await out(store, 1, validates=True)
        await out(store, 2)
        assert (await store.admit(1, 5, LONG)).version == 1  # of iteration 3, which version 1 may generate
        behind = asyncio.ensure_future(store.admit(1, 6, LONG))  # of iteration 4
        assert (await store.admit_validation(1, 1, LONG)).version == 1
        await store.announce_validation(1, 1, 2)
        await store.record_validation(1, scored(1, "a"))
        await asyncio.sleep(0.05)
        assert not behind.done()
        # A chunk that has to be generated again finds the version it names.
        assert (await store.admit_validation(1, 1, LONG)).version == 1
        await store.record_validation(1, scored(1, "b"))
        assert (await asyncio.wait_for(behind, LONG)).version == 2
        _, events = await store.read_events(0, 0.0)
        assert events[1:] == [ValidationAnnounced(1, 2), scored(1, "a"), scored(1, "b")]

    asyncio.run(run())


def test_what_waits_for_a_validation_says_so() -> None:
    async def run() -> None:
        store = await begun(max_staleness=1)
        await out(store, 0, validates=True)
        await out(store, 1)
        for wait in (store.wait_version(1, 1, 0.05), store.admit(1, 4, 0.05)):
            with pytest.raises(StoreTimeout, match="policy version 1, which follows when version 0 has been validated"):
                await wait

    asyncio.run(run())


def test_a_checkpoint_can_wait_for_the_validations_before_it() -> None:
    async def run() -> None:
        store = await begun(max_staleness=2)
        await out(store, 0, validates=True)
        await out(store, 1)
        reached = asyncio.ensure_future(store.wait_version(1, 1, LONG))
        await store.announce_validation(1, 0, 1)
        await asyncio.sleep(0.05)
        assert not reached.done()
        await store.record_validation(1, scored(0, "a"))
        await asyncio.wait_for(reached, LONG)

    asyncio.run(run())
