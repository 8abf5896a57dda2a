"""Dynamic sampling that cannot be is refused by name."""

import pytest

from pipeline.config import ConfigError
from pipeline.derived import uses_filter
from pipeline.plan.checks import check
from pipeline.prompts.generator import Generator
from tests.plan.test_checks import good, refusal

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
        (["algorithm.filter_groups.max_num_gen_batches=0"], "must be at least 1"),
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
