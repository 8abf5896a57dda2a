"""Rules for scripts that train with Megatron: the same sizes, with FSDP2's stages, tensor and sequence parallelism."""

from jobs.verl.keys import MEGATRON as SIZES
from jobs.verl.state import State

_ACTOR = "actor_rollout_ref.actor"
_MEGATRON = f"{_ACTOR}.megatron"
OFFLOAD = f"{_ACTOR}.optim.override_optimizer_config"
"""Megatron's settings for an optimiser in host memory."""
OTHERS = ("actor_rollout_ref.ref.megatron", "critic.megatron")


def uses_megatron(state: State) -> bool:
    """Return True if the script trains with Megatron."""
    engines = {state.given.get(key) for key in ("model_engine", f"{_ACTOR}.strategy", "critic.strategy")}
    return "megatron" in engines or any(key.startswith(f"{_MEGATRON}.") for key in state.given)


def megatron(state: State) -> None:
    """Convert the sizes of Megatron's parallelism, as far as a model can be divided so here."""
    if not uses_megatron(state):
        return
    for key in ("model_engine", *(key for key in state.given if key.endswith(".strategy"))):
        if state.given.get(key) == "megatron":
            state.leave(key, "FSDP2 trains with the sizes of actor.parallel")
    state.notes.append(
        "verl trains this with Megatron; here FSDP2 does, with the same sizes in actor.parallel. Megatron's own layers "
        "are actor.strategy=megatron, for few families (docs/gpus.md)"
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
    full = f"{_MEGATRON}.override_transformer_config.recompute_granularity"
    if full in state.given:
        state.set("model.enable_gradient_checkpointing", state.given[full] is not None)
