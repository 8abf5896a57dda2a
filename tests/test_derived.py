"""Which stages a run has, and what settings amount to that are left open."""

import pytest

from pipeline import derived
from pipeline.config import Config, load_config
from pipeline.config.learner import FSDPConfig
from pipeline.config.model import ModelConfig
from pipeline.config.scoring import ScorerConfig
from pipeline.derived import (
    chunk_prompts,
    reference_is_base,
    scorers,
    scoring_model,
    shards_reference,
    uses_baselines,
    uses_critic,
    uses_policy_scores,
    uses_reference,
)
from pipeline.train.correction import parse
from tests.plan.test_checks import good

STALE = "algorithm.max_staleness=1"
BYPASS = "actor.old_log_probs=engine"
IS = "algorithm.rollout_correction.rollout_is"


@pytest.mark.parametrize(
    ("name", "critic", "policy_scores", "baselines"),
    [
        ("grpo", False, False, False),
        ("gae", True, False, False),
        ("remax", False, False, True),
        ("optimal_token_baseline", False, True, False),
        ("tir_optimal_token_baseline", False, True, False),
        ("pipeline.advantage.returns:gae", True, False, False),
    ],
)
def test_the_estimator_brings_what_it_reads(name, critic, policy_scores, baselines):
    config = good(f"algorithm.adv_estimator={name}")
    found = uses_critic(config), uses_policy_scores(config), uses_baselines(config), uses_reference(config)
    assert found == (critic, policy_scores, baselines, False)
    assert uses_critic(good("critic.enable=true"))


@pytest.mark.parametrize("kl", ["algorithm.use_kl_in_reward=true", "actor.use_kl_loss=true"])
def test_a_kl_brings_the_reference(kl):
    assert uses_reference(good(kl))


@pytest.mark.parametrize(
    ("overrides", "rewarded"),
    [
        ("", False),
        ("agent.environment=a:Game", True),
        ("agent.environment=a:Game agent.reward=sum", True),
        ("agent.environment=a:Game agent.reward=function", False),
        ("agent.program=a:run", True),
        ("agent.command=[python]", True),
        ("agent.tools=[a:calc]", False),
    ],
)
def test_answers_have_rewards_where_these_are_part_of_the_score(overrides, rewarded):
    assert derived.uses_turn_rewards(good(*overrides.split())) == rewarded


def test_pools_in_the_order_of_the_stream():
    keys = ("critic.enable=true", "actor.use_kl_loss=true", "reward.model.path=judge")
    config = good("algorithm.adv_estimator=optimal_token_baseline", *keys)
    assert list(scorers(config)) == ["reward_model", "reference", "value", "policy"]
    assert scorers(config)["value"] is config.scoring.value
    assert scorers(Config()) == {}
    with pytest.raises(ValueError, match="'grpoo' is unknown"):
        scorers(good("algorithm.adv_estimator=grpoo"))


@pytest.mark.parametrize(
    ("overrides", "level"),
    [
        ([], "none"),
        ([STALE], "token"),
        # The ratio of the loss is that to the engine's policy already.
        ([STALE, BYPASS], "none"),
        ([STALE, BYPASS, "actor.policy_loss.loss_mode=reinforce"], "token"),
        # What is set counts.
        ([STALE, f"{IS}=none"], "none"),
        ([STALE, f"{IS}=sequence"], "sequence"),
        ([f"{IS}=sequence"], "sequence"),
    ],
)
def test_the_correction_in_force(overrides, level):
    config = good(*overrides, f"{IS}_threshold='0.5_3'")
    settings = derived.rollout_correction(config)
    assert (settings.rollout_is, settings.rollout_is_threshold) == (level, "0.5_3")
    assert parse(settings).level == (None if level == "none" else level)
    assert config.algorithm.rollout_correction.rollout_is in (None, level), "what was set stays as it was"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.adv_estimator=reinforce_plus_plus"], "needs the rewards of the whole iteration"),
        (["actor.policy_loss.loss_mode=kl_cov"], "actor.policy_loss.loss_mode=kl_cov compares every token"),
        ([f"{IS}=token", f"{IS}_batch_normalize=true"], "by their mean over"),
        (
            ["data.train_batch_size=16", "rollout.chunk_prompts=16"],
            "an iteration has 1 chunk for each of trainer.num_workers=1",
        ),
        (["rollout.sleep=true"], "share GPUs"),
    ],
)
def test_what_keeps_gradients_from_being_streamed(overrides, words):
    config = good(*overrides)
    assert words in (derived.why_not_streamed(config) or "")
    assert not derived.streams_gradients(config)


def test_gradients_are_streamed_where_it_is_possible_unless_switched_off():
    for overrides, streamed in (([], True), (["trainer.stream_gradients=false"], False), ([STALE], True)):
        assert derived.streams_gradients(good(*overrides)) is streamed


def test_losses_of_pairs_need_the_reference_and_no_correction() -> None:
    config = Config()
    assert not derived.uses_reference(config)
    config.algorithm.max_staleness = 1
    assert derived.rollout_correction(config).rollout_is == "token"
    config.actor.policy_loss.loss_mode = "online_dpo"
    assert derived.uses_reference(config) and "reference" in derived.scorers(config)
    assert derived.rollout_correction(config).rollout_is == "none"


@pytest.mark.parametrize(
    ("scorer", "fsdp", "used"),
    [(None, None, "float32"), (None, "bfloat16", "bfloat16"), ("float16", "bfloat16", "float16")],
)
def test_models_score_in_the_trainers_type_unless_told(scorer: str | None, fsdp: str | None, used: str) -> None:
    model = ModelConfig(path="a", enable_gradient_checkpointing=True, activation_offload=True)
    made = scoring_model(model, ScorerConfig(dtype=scorer), FSDPConfig(param_dtype=fsdp))
    assert made == ModelConfig(path="a", dtype=used)
    assert scoring_model(model, ScorerConfig(), FSDPConfig(), "b").path == "b"
    assert scoring_model(model, ScorerConfig(num_gpus=0.5), FSDPConfig()).dtype == "bfloat16"
    assert scoring_model(model, ScorerConfig(num_gpus=1), FSDPConfig(param_dtype="float32")).dtype == "float32"
    assert scoring_model(model, ScorerConfig(), FSDPConfig(), gpu=True).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("rank", "path", "placement", "in_reward", "place"),
    [
        (0, None, None, False, uses_reference),
        (4, None, None, False, reference_is_base),
        (4, "other", None, False, uses_reference),
        (4, None, None, True, uses_reference),
        (4, None, "replicas", False, uses_reference),
        (0, None, "train_workers", False, shards_reference),
        (0, "other", "train_workers", False, shards_reference),
        (4, None, "train_workers", False, reference_is_base),
        (4, "other", "train_workers", False, shards_reference),
    ],
)
def test_the_reference_is_computed_in_one_place_if_something_reads_it(rank, path, placement, in_reward, place):
    config, places = Config(), (uses_reference, reference_is_base, shards_reference)
    config.model.lora.rank, config.algorithm.use_kl_in_reward = rank, in_reward
    config.scoring.reference.path, config.scoring.reference.placement = path, placement
    assert in_reward or not any(found(config) for found in places)
    for loss, kl in (("vanilla", True), ("online_dpo", False)):
        config.actor.policy_loss.loss_mode, config.actor.use_kl_loss = loss, kl
        assert [found for found in places if found(config)] == [place]
        assert derived.trains_beside_reference(config) == (place is not uses_reference)
        assert ("reference" in scorers(config)) == (place is uses_reference)


@pytest.mark.parametrize(
    ("settings", "prompts"),
    [
        ((), 16),
        (("data.train_batch_size=8",), 4),
        (("data.train_batch_size=1",), 1),
        (("data.train_batch_size=64", "trainer.num_workers=2", "actor.ppo_mini_batch_size=16"), 8),
        (("data.train_batch_size=60", "trainer.num_workers=3"), 10),
        (("data.train_batch_size=64", "rollout.num_engines=16"), 4),
        (("data.train_batch_size=8", "rollout.num_engines=16"), 1),
        (("algorithm=ppo", "data.train_batch_size=64", "critic.ppo_mini_batch_size=8"), 8),
        (("data.train_batch_size=64", "critic.ppo_mini_batch_size=8"), 16),
        (("data.train_batch_size=64", "rollout.chunk_prompts=32"), 32),
    ],
)
def test_a_chunk_divides_the_batch_among_workers_and_engines(settings: tuple[str, ...], prompts: int) -> None:
    config = load_config(list(settings))
    assert chunk_prompts(config) == prompts
    assert config.data.train_batch_size % (prompts * config.trainer.num_workers) == 0


def test_a_batch_that_workers_cannot_share_has_chunks_of_one_prompt() -> None:
    assert chunk_prompts(load_config(["data.train_batch_size=7", "trainer.num_workers=2"])) == 1
