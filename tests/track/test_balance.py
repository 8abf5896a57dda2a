"""Who waits for whom, in words."""

import pytest

from pipeline.track.balance import ROLLOUT_IDLE, TRAIN_IDLE, WARMUP_ITERATIONS, advice, idle_shares


def records(rollout: float, train: float, count: int = 4) -> list[dict[str, float]]:
    """A run whose first iterations say something else."""
    started = [{"iteration": i, ROLLOUT_IDLE: 0.5, TRAIN_IDLE: 0.99} for i in range(WARMUP_ITERATIONS)]
    return started + [
        {"iteration": WARMUP_ITERATIONS + i, ROLLOUT_IDLE: rollout, TRAIN_IDLE: train} for i in range(count)
    ]


def test_the_figure_of_an_iteration() -> None:
    assert idle_shares({ROLLOUT_IDLE: 0.412, TRAIN_IDLE: 0.034}) == "idle: engines 41%, trainer 3%"
    assert idle_shares({TRAIN_IDLE: 0.034}) == "idle: trainer 3%"  # a replay has no engines
    assert idle_shares({"critic/score/mean": 1.0}) == ""


@pytest.mark.parametrize(
    ("rollout", "train", "words"),
    [
        (0.02, 0.05, "balanced"),
        (0.4, 0.5, "raise algorithm.max_staleness"),
        (0.02, 0.5, "rollouts limit; add engines (rollout.num_engines)"),
        (0.5, 0.02, "training limits; add train workers (trainer.num_workers)"),
    ],
)
def test_the_advice_names_what_limits(rollout: float, train: float, words: str) -> None:
    said = advice(records(rollout, train))
    assert said is not None and words in said
    assert f"engines idle {rollout:.0%}, trainer idle {train:.0%} of the time" in said


def test_no_advice_where_nothing_has_settled() -> None:
    assert advice([]) is None
    assert advice(records(0.4, 0.4, count=0)) is None
    assert advice([{"iteration": i, TRAIN_IDLE: 0.5} for i in range(9)]) is None
