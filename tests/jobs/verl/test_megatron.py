"""verl's scripts that train with Megatron: the same sizes with FSDP2's stages."""

import pytest

from tests.jobs.verl.test_convert import GRPO, converted, left, notes, values

MEGATRON = "actor_rollout_ref.actor.megatron"
OVERRIDE = f"{MEGATRON}.override_transformer_config"
ENGINE = "model_engine=megatron"
GPUS = ("trainer.nnodes=4", "trainer.n_gpus_per_node=8")


def sizes(*arguments: str) -> dict[str, object]:
    """The sizes of `actor.parallel`."""
    prefix = "actor.parallel."
    return {key.removeprefix(prefix): value for key, value in values(*arguments).items() if key.startswith(prefix)}


def test_sizes_mean_the_same() -> None:
    given = [f"{MEGATRON}.{name}_parallel_size={size}" for name, size in (("tensor_model", 2), ("context", 4))]
    given += [f"{MEGATRON}.pipeline_model_parallel_size=2", f"{MEGATRON}.expert_model_parallel_size=2"]
    assert sizes(GRPO, ENGINE, *given, *GPUS) == {"tensor": 2, "sequence": 4, "pipeline": 2, "expert": 2}
    result = converted(GRPO, ENGINE, *given, *GPUS)
    assert result.values["trainer.num_workers"] % 16 == 0
    assert not [entry for entry in result.left if entry.cannot] and not result.cannot
    assert "actor.strategy=megatron" in notes(GRPO, ENGINE)
    assert "actor.strategy=megatron" not in notes(GRPO)


def test_context_and_ulysses_multiply() -> None:
    ulysses = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    assert sizes(GRPO, ulysses, f"{MEGATRON}.context_parallel_size=2") == {"sequence": 4}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["actor_rollout_ref.model.lora_rank=8"], {"sequence": 2}),
        (["actor_rollout_ref.model.lora.rank=8"], {"sequence": 2}),
        (["data.image_key=images"], {}),
        (["algorithm.adv_estimator=gae"], {"tensor": 2, "sequence": 2}),
        ([], {"tensor": 2, "sequence": 2, "pipeline": 2}),
    ],
    ids=["adapters", "Megatron's adapters", "images", "critic", "nothing else"],
)
def test_what_cannot_be_cut_is_sharded(given: list[str], expected: dict[str, int]) -> None:
    run = [GRPO, *given, *GPUS]
    run += [f"{MEGATRON}.{name}_parallel_size=2" for name in ("tensor_model", "context", "pipeline_model")]
    assert sizes(*run) == expected
    lost = left(*run)
    for name, key in (("pipeline", "pipeline_model"), ("tensor", "tensor_model"), ("sequence", "context")):
        reason = lost.get(f"{MEGATRON}.{key}_parallel_size")
        assert (reason is None) == (name in expected)
        assert reason is None or ("sharded over all train workers" in reason[0] and not reason[1])


@pytest.mark.parametrize(
    ("tensor", "expert", "reason"), [(4, 8, "over the 4 workers"), (1, 8, "by FSDP"), (4, 4, None)]
)
def test_experts_are_divided_as_far_as_tensor_parallelism_goes(tensor: int, expert: int, reason: str | None) -> None:
    run = [GRPO, f"{MEGATRON}.tensor_model_parallel_size={tensor}", f"{MEGATRON}.expert_model_parallel_size={expert}"]
    assert sizes(*run).get("expert", 1) == tensor
    lost = left(*run).get(f"{MEGATRON}.expert_model_parallel_size")
    assert lost is None if reason is None else lost is not None and reason in lost[0] and not lost[1]


def test_what_changes_the_loss_is_not_converted() -> None:
    override = f"{MEGATRON}.override_transformer_config"
    run = [GRPO, f"+{override}.moe_aux_loss_coeff=0.01", f"{MEGATRON}.dtype=float16"]
    assert [entry.key for entry in converted(*run).left if entry.cannot] == [
        f"{override}.moe_aux_loss_coeff",
        f"{MEGATRON}.dtype",
    ]
    same = [f"+{override}.moe_aux_loss_coeff=0", f"{MEGATRON}.dtype=bfloat16", f"+{override}.apply_rope_fusion=True"]
    assert not [entry for entry in converted(GRPO, *same).left if entry.cannot]


@pytest.mark.parametrize(
    ("keys", "left_key"),
    [
        ([f"+{OVERRIDE}.hidden_dropout=0.1"], "hidden_dropout"),
        (
            [f"+{OVERRIDE}.moe_router_enable_expert_bias=True"],
            "moe_router_enable_expert_bias",
        ),
        (["+actor_rollout_ref.model.override_config.moe_config.freeze_moe_router=True"], "freeze_moe_router"),
        (
            [f"{MEGATRON}.use_dist_checkpointing=True", f"{MEGATRON}.dist_checkpointing_path=/m"],
            "dist_checkpointing_path",
        ),
        (["actor_rollout_ref.actor.optim.lr_decay_style=WSD"], "lr_decay_style"),
    ],
)
def test_what_trains_another_model_is_not_converted(keys: list[str], left_key: str) -> None:
    found = [entry.key for entry in converted(GRPO, ENGINE, *keys).left if entry.cannot]
    assert [key.rpartition(".")[2] for key in found] == [left_key]


def test_schedules_and_optimisers_of_megatron() -> None:
    optim = "actor_rollout_ref.actor.optim"
    run = [GRPO, ENGINE, f"{optim}.lr_decay_style=cosine", f"{optim}.lr=1e-5", f"{optim}.min_lr=1e-6"]
    result = converted(*run, f"{optim}.optimizer=adam")
    assert result.values["actor.optim.lr_scheduler_type"] == "cosine"
    assert result.values["actor.optim.min_lr_ratio"] == pytest.approx(0.1)
    assert not [entry for entry in result.left if entry.cannot]


def test_sizes_of_another_engine_are_not_taken() -> None:
    run = [GRPO, "actor_rollout_ref.actor.strategy=fsdp2", f"{MEGATRON}.pipeline_model_parallel_size=4"]
    assert sizes(*run) == {}
    assert "another engine" in left(*run)[f"{MEGATRON}.pipeline_model_parallel_size"][0]


def test_recomputation_and_offload() -> None:
    override = f"{MEGATRON}.override_transformer_config"
    assert values(GRPO, f"+{override}.recompute_granularity=null")["model.enable_gradient_checkpointing"] is False
    assert values(GRPO, f"+{override}.recompute_granularity=full")["model.enable_gradient_checkpointing"] is True
    assert values(GRPO, f"{MEGATRON}.optimizer_offload=True")["actor.fsdp.offload"] == "optimizer"
    inside = "actor_rollout_ref.actor.optim.override_optimizer_config"
    run = [GRPO, ENGINE, f"+{inside}.optimizer_cpu_offload=True", f"+{inside}.optimizer_offload_fraction=1.0"]
    assert values(*run)["actor.fsdp.offload"] == "optimizer"
    assert not [entry for entry in converted(*run).left if entry.cannot]


def test_the_other_models_are_divided_as_the_actor_is() -> None:
    keys = [f"{section}.megatron.pipeline_model_parallel_size" for section in ("actor_rollout_ref.ref", "critic")]
    lost = left(GRPO, ENGINE, *(f"{key}=4" for key in keys))
    assert all("divided as the actor is" in lost[key][0] and not lost[key][1] for key in keys)


def test_other_engines_are_not_built() -> None:
    [(_, (reason, cannot))] = left(GRPO, "model_engine=veomni").items()
    assert cannot and "no other engine" in reason
