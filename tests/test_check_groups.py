"""Dynamic sampling that cannot be is refused by name."""

import pytest

from pipeline.checks import check
from pipeline.config import ConfigError
from pipeline.notes import notes
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
        [CARRY, "algorithm.max_staleness=1", "rollout.partial_tokens=8"],
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
        (["rollout.partial_tokens=8"], "set rollout.oversample above 0 and rollout.oversample_policy=carry"),
        (
            [CARRY, "rollout.partial_tokens=8", "algorithm.max_staleness=1", "rollout.stop=['</s>']"],
            "a text of rollout.stop could begin before the interruption",
        ),
        (["rollout.partial_tokens=-1"], "rollout.partial_tokens=-1 is too small"),
        (
            [CARRY, "rollout.partial_tokens=8", "algorithm.max_staleness=1", "rollout.engine_kwargs.max_model_len=8"],
            "rollout.engine_kwargs.max_model_len=8 would end them before data.max_prompt_length",
        ),
        (["stream.order=first_come"], "stream.order=first_come with rollout.oversample=0.25: that chooses"),
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


# The order of groups, and interruption.


@pytest.mark.parametrize("overrides", [["stream.order=first_come"], ["stream.order=first_come", "rollout.stop=['x']"]])
def test_an_order_that_fits_passes(overrides: list[str]) -> None:
    check(good(*overrides))
    check(good(*overrides, "algorithm.max_staleness=1"))


def test_an_order_that_cannot_be_is_refused() -> None:
    assert "with algorithm.filter_groups.enable=true: that chooses" in refusal(ON, "stream.order=first_come")
    assert "must be one of auto, kept, first_come" in refusal("stream.order=any")


def test_partial_rollouts_need_groups_to_spare() -> None:
    assert "set rollout.oversample above 0" in refusal("rollout.partial_tokens=8")


def test_the_plan_says_who_is_trained_first() -> None:
    def said(*overrides: str) -> bool:
        return "that are complete first" in " ".join(lines(good(*overrides)))

    assert (
        said("algorithm.max_staleness=1") and not said() and not said("algorithm.max_staleness=1", "stream.order=kept")
    )


@pytest.mark.parametrize(
    ("tokens", "more", "words"),
    [
        (64, [], "interrupts nothing"),
        (20, [], "what is not done in time is given up"),
        (32, [], ""),
        (20, ["algorithm.on_stale=correct"], ""),
    ],
)
def test_how_many_tokens_a_go_should_have(tokens: int, more: list[str], words: str) -> None:
    settings = [OVER, CARRY, "algorithm.max_staleness=1", "data.max_response_length=64", *more]
    found = [note for note in notes(good(*settings, f"rollout.partial_tokens={tokens}"), 4, None) if "partial" in note]
    assert len(found) == bool(words) and words in "".join(found)
