"""Dynamic sampling that cannot be is refused by name."""

import pytest

from pipeline.checks import check
from pipeline.config import ConfigError
from pipeline.overlap import ahead, lines
from pipeline.prompts.generator import Generator
from pipeline.prompts.stage import Schedule
from pipeline.stages import uses_filter
from tests.test_checks import good, refusal

ON = "algorithm.filter_groups.enable=true"


class Made(Generator):
    pass


@pytest.mark.parametrize(
    "overrides", [[ON], [ON, "algorithm.filter_groups.metric=acc"], ["rollout.n=1", "algorithm.adv_estimator=gae"]]
)
def test_what_fits_passes(overrides: list[str]) -> None:
    check(good(*overrides))
    assert uses_filter(good(*overrides)) == (ON in overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.n=1", "algorithm.adv_estimator=gae"], "with rollout.n=1 there is one"),
        (["algorithm.filter_groups.metric=''"], "needs algorithm.filter_groups.metric"),
        (["algorithm.filter_groups.surplus=carry"], "with algorithm.max_staleness=0 none may be"),
        (["algorithm.filter_groups.surplus=keep"], "must be one of discard, carry"),
        (["algorithm.filter_groups.max_num_gen_batches=0"], "the smallest value is 1"),
        ([f"data.generator={__name__}:Made"], "data.generator makes the prompts of an iteration"),
        (["data.sampler=solve_rate"], "groups that agree are not recorded"),
    ],
)
def test_what_cannot_be_is_refused(overrides: list[str], words: str) -> None:
    assert words in refusal(ON, *overrides)


def test_a_replay_filters_nothing() -> None:
    config = good(ON)
    config.data.recorded_run = "runs/x"
    assert not uses_filter(config)
    with pytest.raises(ConfigError, match="a replay trains on the groups of its recording"):
        check(config)


# Oversampling.

OVER = "rollout.oversample=0.25"
CARRY = "rollout.oversample_policy=carry"


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.oversample_policy=cancel"],
        [CARRY, "algorithm.max_staleness=1", "rollout.update=in_flight"],
        [ON],
        [ON, "algorithm.filter_groups.surplus=discard", "algorithm.max_staleness=1"],
    ],
)
def test_oversampling_that_fits_passes(overrides: list[str]) -> None:
    check(good(OVER, *overrides))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([CARRY, "rollout.update=in_flight"], "with algorithm.max_staleness=0 no row may be older"),
        ([CARRY, "algorithm.max_staleness=1"], "rollout.update=between_chunks would wait for them"),
        ([ON, "algorithm.filter_groups.surplus=carry", "algorithm.max_staleness=1"], "set surplus=discard"),
        (["rollout.oversample=1.5"], "must lie between 0 and 1"),
        (["rollout.oversample=-0.5"], "must lie between 0 and 1"),
        (["rollout.oversample_policy=keep"], "must be one of drop, cancel, carry"),
    ],
)
def test_oversampling_that_cannot_be_is_refused(overrides: list[str], words: str) -> None:
    first = [] if overrides[0].startswith("rollout.oversample=") else [OVER]
    assert words in refusal(*first, *overrides)


def test_one_version_of_the_bound_is_kept_for_what_is_carried_over() -> None:
    settings = ["algorithm.max_staleness=2", "rollout.update=in_flight", CARRY]
    assert ahead(good(*settings)) == 2, "nothing is oversampled"
    assert ahead(good(OVER, *settings)) == 1
    assert Schedule.of(good(OVER, *settings), 5).max_staleness == 1
    assert "carry groups over into it" in " ".join(lines(good(OVER, *settings[1:], "algorithm.max_staleness=1")))
