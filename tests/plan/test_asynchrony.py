"""What the settings that leave it open amount to: corrections by default, and whether training begins early."""

import pytest

from pipeline import derived
from pipeline.losses.registry import _POLICY_LOSSES
from pipeline.plan import asynchrony
from pipeline.plan.checks import check
from pipeline.plan.plan import plan
from pipeline.train.correction import parse
from tests.plan.test_checks import good, refusal

STREAM = "trainer.stream_gradients"
CORRECTION = "algorithm.rollout_correction"
BYPASS = "actor.old_log_probs=engine"


def stale(versions: int = 1) -> str:
    return f"algorithm.max_staleness={versions}"


# correction


@pytest.mark.parametrize(
    ("overrides", "level"),
    [
        ([], "none"),
        ([stale()], "token"),
        ([stale(4)], "token"),
        # The ratio of the loss is that to the engine's policy already.
        ([stale(), BYPASS], "none"),
        ([stale(), BYPASS, "actor.policy_loss.loss_mode=reinforce"], "token"),
        # What is set counts.
        ([stale(), f"{CORRECTION}.rollout_is=none"], "none"),
        ([stale(), f"{CORRECTION}.rollout_is=sequence"], "sequence"),
        ([f"{CORRECTION}.rollout_is=sequence"], "sequence"),
    ],
)
def test_the_correction_in_force(overrides: list[str], level: str) -> None:
    config = good(*overrides)
    settings = derived.rollout_correction(config)
    assert settings.rollout_is == level
    assert parse(settings).level == (None if level == "none" else level)
    check(config)


def test_thresholds_and_rules_are_those_of_the_settings() -> None:
    config = good(stale(), f"{CORRECTION}.rollout_is_threshold='0.5_3'", f"{CORRECTION}.rollout_rs=token_k2")
    settings = derived.rollout_correction(config)
    assert (settings.rollout_is, settings.rollout_is_threshold, settings.rollout_rs) == ("token", "0.5_3", "token_k2")
    assert config.algorithm.rollout_correction.rollout_is is None, "what was set stays as it was"


# early


def test_the_losses_that_compare_all_tokens_are_known_without_torch() -> None:
    own = [loss for loss in _POLICY_LOSSES.values() if loss.function.__module__.startswith("pipeline.")]
    assert {loss.name for loss in own if loss.token_mask_fn is not None} == set(derived.SELECTING)
    assert set(derived.WITHOUT_RATIO) <= {loss.name for loss in own}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.adv_estimator=reinforce_plus_plus"], "needs the rewards of the whole iteration"),
        (["actor.policy_loss.loss_mode=kl_cov"], "actor.policy_loss.loss_mode=kl_cov compares every token"),
        ([f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_batch_normalize=true"], "by the mean over"),
        (["data.train_batch_size=16"], "an iteration has 1 chunk for each of trainer.num_workers=1"),
    ],
)
def test_what_keeps_training_from_beginning_early(overrides: list[str], words: str) -> None:
    config = good(*overrides)
    assert words in (derived.why_not_streamed(config) or "")
    assert not derived.streams_gradients(config)
    check(config)
    assert words in refusal(*overrides, "trainer.stream_gradients=true")
    assert any(words in line for line in asynchrony.lines(config))


def test_engines_that_sleep_keep_it_too() -> None:
    config = good("rollout.sleep=true")
    assert "share GPUs" in (derived.why_not_streamed(config) or "")


def test_early_is_the_default_where_it_is_possible_and_can_be_switched_off() -> None:
    for overrides, early in (([], True), ([f"{STREAM}=true"], True), ([f"{STREAM}=false"], False)):
        config = good(*overrides)
        check(config)
        assert derived.streams_gradients(config) is early
    assert derived.streams_gradients(good("algorithm.norm_adv_by_std_in_grpo=false", stale(2)))


# words


def words(*overrides: str) -> str:
    return "\n".join(asynchrony.lines(good(*overrides)))


def test_the_plan_says_what_overlaps() -> None:
    assert "strictly on-policy" in words() and "training begins with the first chunks" in words()
    said = words(stale(2))
    assert "engines generate up to 2 iterations ahead" in said
    assert "token weights by default held by 2.0, ratio to the recomputed old policy (decoupled)" in said
    assert "no weights by default, ratio to the engine's policy (bypass)" in words(stale(), BYPASS)
    assert "no weights, ratio" in words(stale(), f"{CORRECTION}.rollout_is=none")
    assert "(trainer.stream_gradients=false)" in words("trainer.stream_gradients=false")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([stale(), f"{CORRECTION}.rollout_is=none"], "without a correction: rows train as if"),
        ([stale(), f"{CORRECTION}.rollout_is=none", BYPASS, "actor.policy_loss.loss_mode=gpg"], "without a correction"),
        ([stale(2), BYPASS], "the clip range lies around a policy up to 2 versions old"),
        ([stale(), "rollout.top_p=0.9"], "weights are below 1 also where the policies agree"),
        ([stale(), "algorithm.adv_estimator=gae"], "the critic's values are of a version up to 1 older"),
        ([stale(3), "algorithm.adv_estimator=optimal_token_baseline"], "sums of a policy up to 3 versions newer"),
        (
            [
                stale(),
                "algorithm.use_kl_in_reward=true",
                "algorithm.kl_ctrl.type=adaptive",
                "algorithm.kl_ctrl.horizon=512",
            ],
            "takes effect 2 iterations later, so the KL may swing; set the horizon to 16384 or more",
        ),
    ],
)
def test_what_is_probably_not_meant_is_noted(overrides: list[str], sentence: str) -> None:
    config = good(*overrides)
    noted = [note for note in plan(config).notes if sentence in note]
    assert len(noted) == 1, plan(config).notes


@pytest.mark.parametrize(
    "overrides",
    [[], [stale()], [stale(4)], [stale(), BYPASS]],
)
def test_sound_settings_get_no_note(overrides: list[str]) -> None:
    assert list(asynchrony.notes(good(*overrides))) == []


@pytest.mark.parametrize("delay", range(5))
def test_the_largest_gain_parts_what_dies_away_from_what_grows(delay: int) -> None:
    for share, dies in ((0.97, True), (1.03, False)):
        x = [1.0] * (delay + 1)
        for _ in range(2000):
            x.append(x[-1] - share * asynchrony.largest_gain(delay) * x[-1 - delay])
        assert (max(map(abs, x[-50:])) < 1e-3) is dies


def test_a_guard_on_the_gap_is_for_rows_of_the_same_version() -> None:
    sentence = refusal(stale(), "trainer.max_log_prob_gap=1e-3")
    assert "trainer.max_log_prob_gap=0.001 with algorithm.max_staleness=1" in sentence
    check(good("trainer.max_log_prob_gap=1e-3"))
