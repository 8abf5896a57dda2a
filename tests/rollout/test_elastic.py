"""When an elastic pool grows and shrinks, by a clock of the test; `tests/test_stream_elastic.py` has a real pool."""

import pytest

from pipeline.rollout.elastic import Bounds, Sizing


class Pool:
    """A pool that does at once what `Sizing` says; each engine that is added starts for a while."""

    def __init__(self, size: int = 1, fewest: int = 1, most: int = 8, start_s: float = 0.0):
        self.sizing = Sizing(Bounds(fewest, most, scale_up_s=10.0, scale_down_s=100.0))
        self.now, self.size, self.start_s = 0.0, size, start_s
        self.starting: list[float] = []

    def run(self, seconds: float, chunks: int, restarting: int = 0, fed: bool = False) -> int:
        """Look each second; the size at the end."""
        for _ in range(round(seconds)):
            self.now += 1.0
            self.starting = [until for until in self.starting if until > self.now]
            delta = self.sizing.look(self.now, chunks, fed, self.size, len(self.starting), restarting)
            self.starting += [self.now + self.start_s] * max(0, delta)
            self.size += delta
        return self.size

    def iterate(self, times: int, work: float, update: float = 20.0) -> int:
        """Iterations in which `work` seconds of one engine are shared by all and the trainer then computes."""
        for _ in range(times):
            self.run(work / self.size, chunks=4)
            self.run(update, chunks=0)
        return self.size


def test_a_long_wait_adds_engines_and_doubles_them() -> None:
    pool = Pool()
    assert [pool.run(seconds, chunks=4) for seconds in (10, 1, 10, 10, 100)] == [1, 2, 4, 8, 8]


def test_short_waits_add_none() -> None:
    pool = Pool()
    assert pool.iterate(50, work=9) == 1


def test_engines_that_generate_ahead_of_a_slow_trainer_are_enough() -> None:
    pool = Pool()
    assert pool.run(1000, chunks=4, fed=True) == 1
    # Now it has taken all rows, and waits.
    assert pool.run(10, chunks=4) == 2


def test_the_time_in_which_engines_start_is_no_reason_for_more() -> None:
    pool = Pool(start_s=60.0)
    pool.run(11, chunks=4)
    assert pool.size == 2 and pool.run(60, chunks=4) == 2
    assert pool.run(11, chunks=4) == 4


def test_engines_without_a_place_do_not_pile_up() -> None:
    pool = Pool(start_s=float("inf"))
    assert pool.run(1000, chunks=4) == 2


def test_a_pool_settles_where_waits_are_short() -> None:
    pool = Pool()
    assert pool.iterate(2, work=25) == 4
    # With one fewer the trainer waits 25 / 3 = 8.3 s, which is short too; with two fewer it would not be.
    assert pool.iterate(40, work=25) == 3
    assert pool.iterate(200, work=25) == 3


def test_no_engine_is_removed_before_two_waits_were_measured() -> None:
    pool = Pool(size=4)
    pool.run(3, chunks=4)
    assert pool.run(500, chunks=0) == 4
    pool.run(3, chunks=4)
    assert pool.run(150, chunks=0) == 4
    pool.run(3, chunks=4)
    assert pool.run(150, chunks=0) == 3


def test_the_fewest_stay() -> None:
    assert Pool(size=3, fewest=2).iterate(200, work=2) == 2


def test_a_lost_engine_gets_the_place_of_another() -> None:
    pool = Pool(size=3)
    pool.run(5, chunks=4)
    # Its process starts again where it was.
    assert pool.run(60, chunks=4, restarting=1) == 3
    pool.run(5, chunks=0)
    # Its node is gone: the others have nothing left to do, and its chunk waits for it.
    assert pool.run(101, chunks=1, restarting=1) == 2
    assert pool.run(100, chunks=1, restarting=1) == 1
    assert pool.run(500, chunks=1, restarting=1) == 1


@pytest.mark.parametrize("lost", [0, 1])
def test_a_wait_for_a_lost_engine_is_no_reason_for_more(lost: int) -> None:
    pool = Pool(size=2)
    pool.run(8, chunks=4)
    pool.run(8, chunks=4, restarting=lost)
    assert pool.size == (2 if lost else 4)
