"""The tables of verl's keys, and what a run says to one of them."""

from fnmatch import fnmatchcase
from typing import Any

import pytest

from jobs import sft, train
from jobs.command import exit_code
from jobs.verl.keys import CANNOT, LOST, RENAMED, RULED, SAME, SECTIONS, UNKNOWN, reason
from pipeline.config import Config, UnknownKey, load_config
from pipeline.config.schema import keys

OURS = keys(Config)
ROLLOUT = "actor_rollout_ref.rollout"


def test_every_target_is_a_key_of_ours_and_no_key_of_verl_is_mapped_twice() -> None:
    assert [ours for _, ours in (*RENAMED, *SECTIONS) if ours not in OURS] == []
    mapped = [theirs for theirs, _ in (*RENAMED, *SECTIONS)] + sorted(RULED)
    assert len(set(mapped)) == len(mapped)


def test_no_pattern_hides_behind_a_wider_one() -> None:
    patterns = [pattern for table in (CANNOT, LOST) for several in table.values() for pattern in several.split()]
    hidden = [
        (pattern, wider)
        for place, pattern in enumerate(patterns)
        for wider in patterns[:place]
        if fnmatchcase(pattern.replace("*", "x"), wider)
    ]
    assert hidden == []


@pytest.mark.parametrize(
    ("key", "value", "part", "cannot"),
    [
        (f"{ROLLOUT}.agent.agent_loop_config_path", "loops.yaml", "agent loops do not run here", True),
        (f"{ROLLOUT}.agent.agent_loop_config_path", None, SAME, False),
        (f"{ROLLOUT}.multi_turn.use_inference_chat_template", True, "stays in the context", True),
        (f"{ROLLOUT}.agent.num_workers", 8, "beside the engines", False),
        ("data.video_key", "videos", "video and audio are not read", True),
        ("data.return_multi_modal_inputs", True, "images are processed as", True),
        (f"{ROLLOUT}.limit_images", 5, "up to 64 images", False),
        ("actor_rollout_ref.model.exclude_modules", "o_proj", "an adapter is model.lora.rank rows", True),
        ("actor_rollout_ref.model.exclude_modules", None, SAME, False),
        ("actor_rollout_ref.actor.megatron.use_mbridge", True, "how Megatron computes", False),
        ("actor_rollout_ref.actor.megatron.dtype", "float16", "in bfloat16 or float32", True),
        ("actor_rollout_ref.actor.strategy", "fsdp2", SAME, False),
        ("actor_rollout_ref.actor.strategy", "veomni", "FSDP2", True),
        ("actor_rollout_ref.actor.engine.context_parallel_size", 8, "actor.parallel.sequence", True),
        ("actor_rollout_ref.actor.engine.context_parallel_size", 1, SAME, False),
        # 1 and True are equal in Python, and mean different things here.
        ("actor_rollout_ref.actor.engine.context_parallel_size", True, "actor.parallel.sequence", True),
        ("actor_rollout_ref.ref.ulysses_sequence_parallel_size", 8, "take whole rows", False),
        ("reward_model.reward_manager", "prime", "no reward managers", True),
        ("reward_model.reward_manager", "dapo", SAME, False),
        ("actor_rollout_ref.actor.fsdp_config.param_offload", True, "weights and gradients make no room", False),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", 16, "packed by tokens", False),
        (f"{ROLLOUT}.nn", 1, UNKNOWN, True),
    ],
)
def test_reasons(key: str, value: object, part: str, cannot: bool) -> None:
    why, lost = reason(key, value)
    assert part in why and lost is cannot


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("actor_rollout_ref.actor.optim.warmup_style", "did you mean actor.optim.lr_scheduler_type?"),
        (f"{ROLLOUT}.multi_turn.enable", "did you mean agent.tools or agent.environment?"),
        ("trainer.nnodes", "did you mean trainer.num_workers, rollout.num_engines"),
        ("actor_rollout_ref.model.lora_rank", "did you mean model.lora.rank?"),
        (f"{ROLLOUT}.name", "did you mean rollout.name?"),
        (f"{ROLLOUT}.megatron.x", "; of such keys in verl: how Megatron computes"),
        ("model.lora.rnk", "the key model.lora.rnk does not exist; did you mean model.lora.rank?"),
        ("model.lora.r", "the key model.lora.r does not exist; the keys of model.lora are rank"),
        ("data.train_bach_size", "did you mean data.train_batch_size?"),
    ],
)
def test_a_command_answers_a_key_of_verls_before_it_guesses(
    key: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def load() -> int:
        load_config([f"{key}=1"])
        return 0

    assert exit_code(load) == 2
    said = capsys.readouterr().err
    assert f"the argument '{key}=1': " in said and key in said and part in said


@pytest.mark.parametrize("job", [train, sft])
def test_every_command_answers_it(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    key = "actor_rollout_ref.actor.optim.warmup_style"
    assert job.main([f"{key}=cosine", "--dry-run"]) == 2
    assert f"there is no key {key}; did you mean actor.optim.lr_scheduler_type?" in capsys.readouterr().err


def test_the_settings_alone_know_no_key_of_verls() -> None:
    with pytest.raises(
        UnknownKey, match=r"actor_rollout_ref.rollout.n does not exist; did you mean rollout.n\?"
    ) as caught:
        load_config(["actor_rollout_ref.rollout.n=1"])
    assert (caught.value.where, caught.value.key) == (
        "the argument 'actor_rollout_ref.rollout.n=1'",
        "actor_rollout_ref.rollout.n",
    )
