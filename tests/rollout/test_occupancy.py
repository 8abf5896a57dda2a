"""Seconds with and without chunks, by a clock that the test turns."""

from pipeline.rollout.occupancy import Occupancy


def test_idle_is_the_time_without_any_chunk() -> None:
    now = [10.0]
    occupancy = Occupancy(lambda: now[0])

    def after(seconds: float) -> None:
        now[0] += seconds

    after(3)
    occupancy.enter()
    after(2)
    occupancy.enter()  # two at a time count once
    after(4)
    occupancy.leave()
    after(1)
    occupancy.leave()
    after(5)
    assert occupancy.take() == (8.0, 7.0)
    after(1)
    occupancy.enter()
    after(2)
    assert occupancy.take() == (1.0, 2.0)  # in the middle of a chunk
    after(6)
    occupancy.leave()
    assert occupancy.take() == (0.0, 6.0)
