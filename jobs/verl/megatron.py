"""Rules for scripts that train with Megatron: the same sizes, with FSDP2's stages, tensor and sequence parallelism."""

from jobs.verl.keys import MEGATRON as SIZES
from jobs.verl.state import State

_ACTOR = "actor_rollout_ref.actor"
_MEGATRON = f"{_ACTOR}.megatron"
OFFLOAD = f"{_ACTOR}.optim.override_optimizer_config"
"""Megatron's settings for an optimiser in host memory."""
OTHERS = ("actor_rollout_ref.ref.megatron", "critic.megatron")
OVERRIDE = f"{_MEGATRON}.override_transformer_config"
ROUNDING = {
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "apply_rope_fusion"),
    *("attention_backend", "bias_activation_fusion", "bias_dropout_fusion", "deallocate_pipeline_outputs"),
    *("gradient_accumulation_fusion", "masked_softmax_fusion", "moe_enable_deepep", "moe_flex_dispatcher_backend"),
    *("moe_grouped_gemm", "moe_permute_fusion", "moe_router_dtype", "moe_shared_expert_overlap"),
    *("moe_token_dispatcher_type", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("persist_layer_norm", "recompute_granularity", "recompute_method", "recompute_modules", "recompute_num_layers"),
    *("use_flash_attn", "use_fused_rmsnorm", "use_fused_rotary_pos_emb"),
}
"""Entries of `OVERRIDE` that change numbers by rounding only."""
SCHEDULES = ("constant", "cosine", "linear")


def uses_megatron(state: State) -> bool:
    """Return True if the script trains with Megatron."""
    engines = [state.given[key] for key in ("model_engine", f"{_ACTOR}.strategy") if key in state.given]
    if engines:
        return "megatron" in engines
    return any(key.startswith(f"{_MEGATRON}.") for key in state.given)


def megatron(state: State) -> None:
    """Convert the sizes of Megatron's parallelism, as far as a model can be divided so here."""
    if not uses_megatron(state):
        for name in (*SIZES, "optimizer_offload"):
            state.leave(f"{_MEGATRON}.{name}", "the script trains with another engine, which does not read it")
        return
    _override(state)
    _optimiser(state)
    for key in ("model_engine", *(key for key in state.given if key.endswith(".strategy"))):
        if state.given.get(key) == "megatron":
            state.leave(key, "FSDP2 trains with the sizes of actor.parallel")
    state.notes.append(
        "verl trains this with Megatron; here FSDP2 does, with the same sizes in actor.parallel. Megatron's own layers "
        "are actor.strategy=megatron, for few families (see `slipstream docs gpus`)"
    )
    whole = {name: max(1, state.whole(f"{_MEGATRON}.{name}", 1)) for name in SIZES}
    reads_images = state.get("model.vision") != "none"
    reasons = {
        "a model with adapters": state.get("model.lora.rank") > 0,
        "a model that reads images": reads_images,
        "a critic": "value" in state.scorers,
    }
    uncut = next((name for name, applies in reasons.items() if applies), None)
    for name, ours in SIZES.items():
        size = whole[name]
        if size == 1:
            continue
        key, way = f"{_MEGATRON}.{name}", ours.rpartition(".")[2]
        critic_alone = uncut == "a critic"
        if way == "pipeline" and uncut:
            state.leave(key, f"{uncut} is not cut into stages; its layers are sharded over all train workers")
        elif way in ("tensor", "sequence") and uncut and not critic_alone and (reads_images or way == "tensor"):
            state.leave(key, f"{uncut} is not divided so; it is sharded over all train workers")
        elif way != "expert":
            state.set(ours, size * state.get(ours))
    if whole["expert_model_parallel_size"] > 1:
        tensor = state.get("actor.parallel.tensor")
        state.set("actor.parallel.expert", tensor)
        if tensor != whole["expert_model_parallel_size"]:
            divided = f"over the {tensor} workers of actor.parallel.tensor" if tensor > 1 else "by FSDP"
            state.leave(f"{_MEGATRON}.expert_model_parallel_size", f"experts are divided {divided}")
    for section in OTHERS:
        for name in (*SIZES, "virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size"):
            state.leave(f"{section}.{name}", "every model is divided as the actor is (actor.parallel)")
    for name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer"):
        state.leave(f"{OFFLOAD}.{name}", "actor.fsdp.offload=optimizer keeps all of its state in host memory")
    if f"{OFFLOAD}.optimizer_cpu_offload" in state.given:
        state.also.add(f"{OFFLOAD}.optimizer_cpu_offload")
        if state.given[f"{OFFLOAD}.optimizer_cpu_offload"] is True:
            state.set("actor.fsdp.offload", "optimizer")
    full = f"{OVERRIDE}.recompute_granularity"
    if full in state.given:
        state.set("model.enable_gradient_checkpointing", state.given[full] is not None)


def _override(state: State) -> None:
    """Leave entries of Megatron's configuration: they change nothing, or the model that is trained."""
    for key, value in state.given.items():
        name = key.removeprefix(f"{OVERRIDE}.")
        if name == key or name == "recompute_granularity":
            continue
        off = value in (None, False, 0, [], "") or value in ("null", "none")
        if name not in ROUNDING and not off:
            state.leave(key, "it changes what the model computes", cannot=True)
    for key in ("freeze_moe_router", "moe_config.freeze_moe_router"):
        full = f"actor_rollout_ref.model.override_config.{key}"
        if state.given.get(full) is True:
            state.leave(full, "routers are trained with the rest", cannot=True)
    for section in (_MEGATRON, *OTHERS):
        if state.given.get(f"{section}.use_dist_checkpointing") is True:
            state.leave(f"{section}.dist_checkpointing_path", "weights are read from model.path alone", cannot=True)


def _optimiser(state: State) -> None:
    """Convert Megatron's own names of the optimiser and its schedule."""
    for learner, section in (("actor", _ACTOR), ("critic", "critic")):
        if state.given.get(f"{section}.optim.optimizer") == "adam":
            state.leave(f"{section}.optim.optimizer", "Megatron's adam is AdamW, as here")
        style = state.given.get(f"{section}.optim.lr_decay_style")
        if style is None or style == "constant":
            continue
        key = f"{section}.optim.lr_decay_style"
        if style in SCHEDULES:
            state.set(f"{learner}.optim.lr_scheduler_type", style)
            state.also.add(key)
            rate, least = (state.given.get(f"{section}.optim.{name}") for name in ("lr", "min_lr"))
            if isinstance(rate, int | float) and isinstance(least, int | float) and rate:
                state.set(f"{learner}.optim.min_lr_ratio", least / rate)
                state.also.add(f"{section}.optim.min_lr")
        else:
            state.leave(key, f"a learning rate is {', '.join(SCHEDULES[:-1])} or {SCHEDULES[-1]}", cannot=True)
