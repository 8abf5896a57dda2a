"""Leases of the engine loop: between two turns of an episode no request runs, and the weights stay nevertheless."""

import random
import threading
import time
from concurrent.futures import Future

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.rollout.engine import EngineLoop, Lease
from tests.rollout.test_engine import WAIT, Loop, free, gated, texts

__all__ = ["free", "gated"]


def turn(loop: EngineLoop, lease: Lease, text: str = "turn") -> str:
    """The answer of one turn, with the versions at its beginning and at its end."""
    return texts(loop.submit([(text, 1)], lease=lease))[0]


def test_a_load_waits_for_the_episode_and_the_episode_never_for_the_load(free: Loop) -> None:
    lease = free.loop.lease()
    assert turn(free.loop, lease) == "turn v0-0"
    load = free.loop.call(lambda engine: engine.load(1), when_idle=True)
    behind = free.loop.submit([("behind", 1)])
    for _ in range(3):
        assert turn(free.loop, lease) == "turn v0-0"
    assert not load.done() and not behind.done()
    free.loop.give_back(lease)
    assert load.result(WAIT) == 1
    assert texts(behind) == ["behind v1-1"]


def test_the_loop_sleeps_while_all_episodes_wait_for_their_environments(free: Loop) -> None:
    lease = free.loop.lease()
    turn(free.loop, lease)
    load = free.loop.call(lambda engine: engine.load(1), when_idle=True)
    clock = time.pthread_getcpuclockid(free.loop._thread.ident or 0)
    before = time.clock_gettime(clock)
    time.sleep(0.2)
    assert time.clock_gettime(clock) - before < 0.1, "the loop spins while it waits"
    free.loop.give_back(lease)
    assert load.result(WAIT) == 1


def test_a_lease_behind_a_load_begins_with_the_new_version(free: Loop) -> None:
    first = free.loop.lease()
    assert turn(free.loop, first) == "turn v0-0"
    load = free.loop.call(lambda engine: engine.load(1), when_idle=True)
    second = free.loop.lease()
    early = free.loop.submit([("early", 1)], lease=second)
    assert turn(free.loop, first) == "turn v0-0"
    assert not early.done(), "its lease waits for the load"
    free.loop.give_back(first)
    assert load.result(WAIT) == 1
    assert texts(early) == ["early v1-1"]


def test_a_lease_between_two_loads_has_its_turns_before_the_second(free: Loop) -> None:
    first = free.loop.lease()
    assert turn(free.loop, first) == "turn v0-0"
    loads = [free.loop.call(lambda engine: engine.load(1), when_idle=True)]
    second = free.loop.lease()
    loads.append(free.loop.call(lambda engine: engine.load(2), when_idle=True))
    early = free.loop.submit([("early", 1)], lease=second)
    free.loop.give_back(first)
    assert loads[0].result(WAIT) == 1
    assert texts(early) == ["early v1-1"] and not loads[1].done()
    free.loop.give_back(second)
    assert loads[1].result(WAIT) == 2


def test_an_update_runs_between_turns_but_not_of_episodes_of_one_version(free: Loop) -> None:
    training, validation = free.loop.lease(), free.loop.lease(one_version=True)
    assert turn(free.loop, validation) == "turn v0-0"
    update = free.loop.update(lambda engine: engine.change(1))
    assert turn(free.loop, training) == "turn v0-0" and not update.done()
    free.loop.give_back(validation)
    assert update.result(WAIT) == 1
    assert turn(free.loop, training) == "turn v1-1"
    free.loop.give_back(training)


def test_an_aborted_turn_is_dropped_and_holds_nothing_up(gated: Loop) -> None:
    lease = gated.loop.lease()
    dropped = gated.loop.submit([("dropped", 100)], lease=lease)
    kept = gated.loop.submit([("kept", 3)], lease=lease)
    gated.step(1)
    gated.loop.abort(dropped, lease)
    gated.loop.give_back(lease)
    load = gated.loop.call(lambda engine: engine.load(1), when_idle=True)
    gated.step(2)
    assert texts(kept) == ["kept v0-0"]
    assert load.result(WAIT) == 1
    assert not dropped.done() and "abort" in gated.engine.log


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1))
def test_whole_episodes_have_one_version_whatever_the_order(seed: int) -> None:
    """Threads play episodes with pauses between turns while loads arrive."""
    made, dice = Loop(gated=False), random.Random(seed)
    seen: list[set[str]] = []
    loads: list[Future] = []

    def play(turns: int, pause: float) -> None:
        lease = made.loop.lease()
        versions = set()
        for _ in range(turns):
            versions.add(turn(made.loop, lease).split()[1])
            time.sleep(pause)
        made.loop.give_back(lease)
        seen.append(versions)

    threads = [threading.Thread(target=play, args=(dice.randint(1, 4), dice.random() / 500)) for _ in range(6)]
    for number, thread in enumerate(threads):
        thread.start()
        if dice.random() < 0.6:
            loads.append(
                made.loop.call(lambda engine, version=number + 1: engine.load(version), when_idle=True)  # type: ignore[misc]
            )
    for thread in threads:
        thread.join(WAIT)
    for load in loads:
        load.result(WAIT)
    made.loop.close()
    assert len(seen) == 6 and all(len(versions) == 1 for versions in seen)
