"""The parts of the soak that need no Ray: what counts as growth."""

import random

import pytest

from benchmarks.soak import Growth, complaints, growths, report, slope
from benchmarks.stand_in import Sample


def samples(per_iteration: float, noise: float = 0.0, count: int = 400) -> list[Sample]:
    """Two chunks an iteration, one sample every five iterations, a start that is steeper than the rest."""
    rng, made = random.Random(0), []
    for number in range(count):
        iteration = 5 * number
        memory = 100 + min(iteration, 500) * 0.1 + iteration * per_iteration + rng.gauss(0, noise)
        if number % 50 == 49:
            memory += 500  # a peak
        made.append(Sample(number, 2 * iteration, {"driver": memory}, {}, 7.0, {"driver": 20}))
    return made


def test_slope_is_that_of_a_line_whatever_single_points_do() -> None:
    assert slope([(x, 3 * x + 1) for x in range(50)]) == pytest.approx(3)
    assert slope([(x, 3 * x + 1 + 1000 * (x == 17)) for x in range(50)]) == pytest.approx(3)
    assert slope([(1.0, 5.0)]) == slope([]) == 0.0


@pytest.mark.parametrize("per_iteration", [0.0, 0.01, 0.2])
def test_growth_is_seen_through_noise_and_the_start_does_not_count(per_iteration: float) -> None:
    found = {growth.name: growth for growth in growths(samples(per_iteration, noise=1.0), 2)}
    memory = found["driver: memory"]
    assert memory.per_1000 == pytest.approx(1000 * per_iteration, abs=2.0)
    assert found["object store"].per_1000 == found["driver: handles"].per_1000 == 0.0
    bad = complaints([0.01], list(found.values()), 50.0, 0.05)
    assert bool(bad) == (per_iteration > 0.005), bad


def test_what_is_small_or_quick_is_no_complaint() -> None:
    grown = [Growth("a", "MiB", 1.0, 5.0, 4.0), Growth("b", "MiB", 1000.0, 1020.0, 20.0)]
    assert complaints([0.02, 0.03, 9.0], grown, 50.0, 0.05) == []
    assert complaints([0.06], [Growth("c", "", 10.0, 20.0, 10.0)], 50.0, 0.05) == [
        "an iteration takes 60 ms, more than 50 ms",
        "c grows by 10.0  in 1000 iterations, 100% of what it was",
    ]
    assert report([0.01, 0.02], grown).row_count == 2


def test_too_short_a_run_is_refused() -> None:
    with pytest.raises(ValueError, match="too few to see growth"):
        growths(samples(0.0, count=2), 2)
