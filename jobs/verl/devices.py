"""Rules for GPUs: how verl's are shared out here, and what each holds."""

import math

from jobs.verl.state import State

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_GPUS_PER_NODE, _NODES = 8, 1
_MOST_GPUS = 1 << 16
_MAX_CHUNK = 16


def sequences(state: State) -> None:
    """Set `actor.parallel.sequence` from the actor's Ulysses size. The critic uses the same number of GPUs for a row;
    a different number of its own is reported."""
    name = "ulysses_sequence_parallel_size"
    ranks = max(state.whole(f"{section}.{name}", 1) for section in (_ACTOR, f"{_ACTOR}.fsdp_config"))
    state.set("actor.parallel.sequence", max(ranks, 1))
    for section in ("critic", "critic.fsdp"):
        if state.whole(f"{section}.{name}", 1) != ranks:
            state.leave(f"{section}.{name}", f"the critic is divided as the actor is, actor.parallel.sequence={ranks}")


def offload(state: State) -> None:
    """Convert offloading: of the optimiser state, or of everything (`offload_policy` of verl's FSDP2)."""
    for learner, sections in (
        ("actor", (f"{_ACTOR}.fsdp_config", f"{_ACTOR}.megatron")),
        ("critic", ("critic.fsdp", "critic.model.fsdp_config", "critic.megatron")),
    ):
        for name, kind in (("optimizer_offload", "optimizer"), ("offload_policy", "all")):
            if any(state.given.get(f"{section}.{name}") is True for section in sections):
                state.set(f"{learner}.fsdp.offload", kind)


def engines(state: State) -> None:
    """Give an engine no more GPUs than a node has."""
    size, node = state.get("rollout.tensor_parallel_size"), state.whole("trainer.n_gpus_per_node", _GPUS_PER_NODE)
    if size != 1 and not 1 <= size <= node:
        state.drop("rollout.tensor_parallel_size")
        key = f"{_ROLLOUT}.tensor_model_parallel_size"
        state.leave(key, f"an engine has GPUs of one node, and a node has {node}", cannot=True)
    # Engines on GPUs use chunked prefill unless a setting turns it off.
    if state.given.get(f"{_ROLLOUT}.enable_chunked_prefill") is False:
        state.set("rollout.engine_kwargs", {**state.get("rollout.engine_kwargs"), "enable_chunked_prefill": False})


def all_gpus(state: State) -> int:
    """Return the number of GPUs of all nodes."""
    return state.whole("trainer.n_gpus_per_node", _GPUS_PER_NODE) * state.whole("trainer.nnodes", _NODES)


def devices(state: State) -> None:
    """Divide the GPUs between train workers, engines and scoring replicas. In verl they share every GPU in turn.

    Half of the GPUs train. The chunk times the workers divides the mini-batch, so every worker gets whole chunks.
    """
    gpus, batch, pools = all_gpus(state), state.get("data.train_batch_size"), list(state.scorers)
    minis = [state.get("actor.ppo_mini_batch_size") or batch]
    if "value" in pools:
        minis.append(state.get("critic.ppo_mini_batch_size") or minis[0])
    if not 1 <= gpus <= _MOST_GPUS or min(batch, *minis) < 1:
        state.notes.append(
            f"{gpus} GPUs for batches of {batch} prompts are not spread; set trainer.num_workers yourself"
        )
        return
    mini, split = math.gcd(*minis), state.get("rollout.tensor_parallel_size")
    same = math.prod(state.get(f"actor.parallel.{name}") for name in ("tensor", "sequence", "pipeline"))
    counts = range(same, gpus // 2 + 1, same)
    workers = max((count for count in counts if mini % count == 0), default=same)
    rest = gpus - workers
    # A replica makes one forward pass; meanwhile a worker makes one and a training step.
    replicas = max(1, rest // 4) if pools else 0
    engine_count = max(1, (rest - replicas) // split)
    if pools:
        replicas = max(replicas, rest - engine_count * split)
    chunks = [size for size in range(1, _MAX_CHUNK + 1) if mini // workers % size == 0]
    chunk = max((size for size in chunks if batch // size >= 2 * engine_count), default=1)
    layout = {
        "trainer.num_workers": workers,
        "trainer.use_gpu": True,
        "rollout.num_engines": engine_count,
        "rollout.num_gpus": 1,
        "rollout.chunk_prompts": chunk,
    }
    for pool in pools:
        layout[f"scoring.{pool}.num_workers"] = replicas
        layout[f"scoring.{pool}.num_gpus"] = round(1 / len(pools), 2)
    for ours, value in layout.items():
        state.set(ours, value)
    state.notes.append(
        f"verl's processes share {gpus} GPUs in turn; here {workers} train, {engine_count} engines of {split} generate"
        f"{f' and {replicas} score' if pools else ''}: {workers + engine_count * split + replicas} GPUs. Move them to "
        "where the run waits, and raise rollout.gpu_memory_utilization: an engine has its GPU to itself"
    )
    if workers + engine_count * split + replicas > gpus:
        remedy = "a smaller rollout.tensor_parallel_size or smaller sizes of actor.parallel take fewer"
        if split == 1:
            remedy = "trainer.gpus_per_worker=0.6 rollout.num_gpus=0.4 rollout.sleep=true puts engines on the GPUs of "
            remedy += f"the train workers, so that {workers + replicas} do"
        state.notes.append(f"that is more than verl's {gpus} GPUs; {remedy}")
