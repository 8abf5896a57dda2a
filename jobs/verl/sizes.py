"""Rules for batches, schedules and memory: numbers that count something else here, or must fit together."""

import math
from typing import Any

from jobs.verl.layout import lay_out
from jobs.verl.state import GPUS_PER_NODE, NODES, State

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
_CRITIC_TOKENS = 32768
_MOST_GPUS = 1 << 16
_MOST_PROMPTS = 1 << 20


def mini_batches(state: State) -> None:
    """Every mini-batch has the same size, so it divides the batch."""
    batch = state.get("data.train_batch_size")
    for learner in ("actor", "critic"):
        key = f"{learner}.ppo_mini_batch_size"
        mini = state.get(key)
        if mini is None or mini < 1 or not 1 <= batch <= _MOST_PROMPTS:
            continue
        fitting = max(size for size in range(1, min(mini, batch) + 1) if batch % size == 0)
        if fitting != mini:
            state.set(key, fitting)
            state.note(f"{key}={mini} does not divide data.train_batch_size={batch}; {fitting} does")


def critic(state: State) -> None:
    """Keys of the critic where there is one, and its start."""
    warmup = state.get("critic.warmup")
    if not state.uses_critic:
        for ours in [ours for ours in state.defaults if ours.startswith("critic.")]:
            state.drop(ours)
        state.drop("critic.warmup")
        if warmup:
            state.leave("trainer.critic_warmup", "there is no critic to train alone")
        return
    if warmup:
        # verl counts steps from 1 and asks whether critic_warmup <= step.
        state.set("critic.warmup", max(warmup - 1, 0))
        state.note(
            f"trainer.critic_warmup={warmup}: verl updates the policy from step {warmup} on, after {warmup - 1} steps "
            f"of the critic alone, which is critic.warmup={warmup - 1}"
        )
    if "critic.path" not in state.values:
        state.note("critic.model.path is not given: the critic starts from model.path")
    state.note("the critic takes over the decoder of its model; its value head starts at 0")


def warmups(state: State) -> None:
    """verl's schedule moves on once an iteration, ours once an optimiser step."""
    for learner, per_iteration in state.steps_per_iteration.items():
        key = f"{learner}.optim.lr_warmup_steps"
        steps = state.get(key)
        if steps <= 0:
            state.drop(key)
        elif per_iteration > 1:
            state.set(key, steps * per_iteration)
            state.note(
                f"{key}: verl counts {steps} iterations, here these are {steps} x {per_iteration} = "
                f"{steps * per_iteration} optimiser steps"
            )


def token_budgets(state: State) -> None:
    """Micro-batches of so many rows, or of so many tokens, become tokens."""
    pools = state.scorers
    actor = _budget(
        state, "actor.ppo_max_token_len_per_gpu", _ACTOR, "ppo", state.get("actor.ppo_max_token_len_per_gpu")
    )
    if "reference" in pools:
        _budget(state, "scoring.reference.max_token_len", _REF, "log_prob", actor)
    else:
        _unused(state, _REF, "log_prob", "there is no KL, so no reference policy")
    if state.uses_critic:
        critic = _budget(state, "critic.ppo_max_token_len_per_gpu", "critic", "ppo", _CRITIC_TOKENS)
        _budget(state, "scoring.value.max_token_len", "critic", "forward", critic)
    else:
        _unused(state, "critic", "ppo", "there is no critic")
        _unused(state, "critic", "forward", "there is no critic")
    if "policy" in pools:
        state.set("scoring.policy.max_token_len", actor)


def _budget(state: State, ours: str, section: str, kind: str, default: int) -> int:
    """Set `ours` to the tokens that verl takes into one forward pass; returns them."""
    longest = state.get("data.max_prompt_length") + state.get("data.max_response_length")
    dynamic = f"{section}.log_prob_use_dynamic_bsz" if kind == "log_prob" else f"{section}.use_dynamic_bsz"
    packs = state.given.get(dynamic, state.given.get(f"{_ACTOR}.use_dynamic_bsz")) is True
    per_gpu, in_all = f"{section}.{kind}_micro_batch_size_per_gpu", f"{section}.{kind}_micro_batch_size"
    most = f"{section}.{kind}_max_token_len_per_gpu"
    tokens = state.whole(most, default) or default
    rows = state.whole(per_gpu)
    if rows is None and (everywhere := state.whole(in_all)):
        rows = max(1, everywhere // max(1, state.gpus))
    if rows is None and kind == "forward":
        rows = state.whole(f"{section}.ppo_micro_batch_size_per_gpu")
    if packs:
        why = "rows are packed by tokens (so are verl's with use_dynamic_bsz)"
    else:
        tokens = rows * longest if rows else default
        why = f"rows are packed by tokens; {rows} rows of {longest} tokens are {ours}={tokens}"
        state.leave(most, "without use_dynamic_bsz verl does not read it, either")
    if tokens < longest:
        state.note(f"{ours} is {longest}, not {tokens}: the longest row must fit into one forward pass")
        tokens = longest
    for key in (per_gpu, in_all):
        state.leave(key, why)
    state.set(ours, tokens)
    return tokens


def _unused(state: State, section: str, kind: str, why: str) -> None:
    for name in ("micro_batch_size_per_gpu", "micro_batch_size", "max_token_len_per_gpu"):
        state.leave(f"{section}.{kind}_{name}", why)


def engines(state: State) -> None:
    """vLLM, on the GPUs of one node an engine."""
    if state.given.get(f"{_ROLLOUT}.name", "vllm") != "vllm":
        state.leave(f"{_ROLLOUT}.name", "only vLLM is an engine here, and the run uses it")
    size, node = state.get("rollout.tensor_parallel_size"), state.whole("trainer.n_gpus_per_node", GPUS_PER_NODE) or 0
    if size != 1 and not 1 <= size <= node:
        state.drop("rollout.tensor_parallel_size")
        state.leave(
            f"{_ROLLOUT}.tensor_model_parallel_size",
            f"an engine has GPUs of one node, and a node has {node}; a model that needs more does not fit",
        )
    # Engines on GPUs prefill in chunks unless they are told otherwise.
    if state.given.get(f"{_ROLLOUT}.enable_chunked_prefill") is False:
        state.set("rollout.engine_kwargs", {**state.get("rollout.engine_kwargs"), "enable_chunked_prefill": False})


def devices(state: State) -> None:
    """verl's processes share every GPU in turn; here train workers, engines and scoring replicas have their own."""
    for key, assumed in (("trainer.n_gpus_per_node", GPUS_PER_NODE), ("trainer.nnodes", NODES)):
        if key in state.reasons:
            state.reasons[key] += f"; {assumed} is assumed"
    gpus, batch = state.gpus, state.get("data.train_batch_size")
    minis = [state.get("actor.ppo_mini_batch_size") or batch]
    if state.uses_critic:
        minis.append(state.get("critic.ppo_mini_batch_size") or minis[0])
    if not 1 <= gpus <= _MOST_GPUS or min(batch, *minis) < 1:
        state.note(
            f"{gpus} GPUs for batches of {batch} prompts are not spread over workers and engines; set them yourself"
        )
        return
    pools = list(state.scorers)
    split = state.get("rollout.tensor_parallel_size")
    layout = lay_out(gpus, batch, math.gcd(*minis), len(pools), split)
    values: dict[str, Any] = {
        "trainer.num_workers": layout.workers,
        "trainer.use_gpu": True,
        "rollout.num_engines": layout.engines,
        "rollout.num_gpus": 1,
        "rollout.chunk_prompts": layout.chunk,
    }
    of_each = f" of {split} GPUs each (rollout.tensor_parallel_size)" if split > 1 else ""
    shares = [f"trainer.num_workers={layout.workers}", f"rollout.num_engines={layout.engines}{of_each}"]
    for pool in pools:
        values |= {f"scoring.{pool}.num_workers": layout.replicas, f"scoring.{pool}.num_gpus": layout.share}
        shares.append(f"scoring.{pool}.num_workers={layout.replicas} with num_gpus={layout.share:g}")
    for ours, value in values.items():
        state.set(ours, value)
    more = f"{layout.gpus - gpus} more than" if layout.gpus > gpus else "as many as"
    if layout.gpus < gpus:
        more = f"{gpus - layout.gpus} fewer than"
    state.note(
        "verl trains, generates and scores on the same GPUs in turn; here each has GPUs of its own: "
        f"{', '.join(shares)}. That takes {layout.gpus} GPUs, {more} there. Move them to where the run waits, and "
        "raise rollout.gpu_memory_utilization: an engine has its GPU to itself"
    )
