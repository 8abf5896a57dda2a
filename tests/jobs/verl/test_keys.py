"""The tables of verl's keys: every target exists, nothing stands twice, every reason is a sentence of its own."""

from fnmatch import fnmatchcase

import pytest

from jobs.verl.gone import GONE, NOTHING_LOST, UNKNOWN, reason
from jobs.verl.keys import DEFAULTS, RENAMED, RULED, SECTIONS
from pipeline.config import Config, keys

OURS = keys(Config)


def test_every_target_is_a_key_of_ours() -> None:
    assert [ours for _, ours in (*RENAMED, *SECTIONS) if ours not in OURS] == []


def test_no_key_of_verl_is_mapped_twice() -> None:
    mapped = [theirs for theirs, _ in (*RENAMED, *SECTIONS)] + sorted(RULED)
    assert len(set(mapped)) == len(mapped)


def test_defaults_are_those_of_renamed_keys() -> None:
    assert DEFAULTS.keys() <= dict(RENAMED).keys()


def test_patterns_stand_once_and_none_hides_behind_a_wider_one() -> None:
    patterns = [gone.pattern for gone in GONE]
    assert len(set(patterns)) == len(patterns)
    hidden = [
        (pattern, wider)
        for place, pattern in enumerate(patterns)
        for wider in patterns[:place]
        if fnmatchcase(pattern.replace("*", "x"), wider)
    ]
    assert hidden == []


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("algorithm.filter_groups.max_inflight_gen_batches", 2, "as soon as groups are dropped"),
        ("reward.reward_kwargs.overlong_buffer_cfg.log", True, "among the parts of the reward"),
        ("reward_model.sandbox_fusion.max_concurrent", 64, "limits of its own"),
        ("reward_model.reward_manager", "dapo", "no reward managers"),
        ("reward.reward_manager.name", "prime", "no reward managers"),
        ("actor_rollout_ref.rollout.multi_turn.enable", True, "no tools"),
        ("actor_rollout_ref.rollout.agent.num_workers", 8, "agent loops"),
        ("actor_rollout_ref.model.lora_rank", 32, "LoRA"),
        ("actor_rollout_ref.model.lora_rank", 0, NOTHING_LOST),
        ("actor_rollout_ref.model.target_modules", "all-linear", "LoRA"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", 2, "Megatron"),
        ("actor_rollout_ref.actor.strategy", "fsdp2", NOTHING_LOST),
        ("actor_rollout_ref.actor.strategy", "megatron", "FSDP2"),
        ("actor_rollout_ref.model.use_remove_padding", True, NOTHING_LOST),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", 8, "never split"),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", 1, NOTHING_LOST),
        ("actor_rollout_ref.ref.fsdp_config.param_offload", True, "stay on the GPU"),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", 16, "packed by tokens"),
        ("trainer.v1.trainer_mode", "separate_async", "synchronous"),
        ("data.image_key", "images", "images"),
        ("actor_rollout_ref.rollout.nn", 1, UNKNOWN),
        ("nonsense", 1, UNKNOWN),
    ],
)
def test_reasons(key: str, value: object, part: str) -> None:
    assert part in reason(key, value)
