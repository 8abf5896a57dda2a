"""How long an iteration takes on GPUs: arithmetic on datasheets, made before anything has run.

    operations of a token   2 a parameter that it passes through, and 2 x queries x length in each layer's attention
    passes                  log-probs 1, an update 3, 4 with gradient checkpointing; adapters alone 1 less
    a pass                  the longest of its operations with exchanges in the layers, of what FSDP gathers and sums,
                            and of what waits on the host
    exchanges in a layer    of tensor parallelism 2 sums of its outputs, and 5 of its gradients; of sequence parallelism
                            queries, keys, values and outputs of attention, and their gradients
    a token of each response  the longer of reading weights and KV cache, and of operations
    publishing              bytes at the rate that was measured on CPUs (docs/benchmarks.md)

Rows have full length and share no prompt in the trainer, so real iterations are shorter.
"""

import math
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.config.learner import ActorConfig, CriticConfig
from pipeline.derived import UpdateShape, scorers, streams_gradients, trains_beside_reference, uses_critic, uses_engines
from pipeline.plan.fit import shares_gpus
from pipeline.plan.gpus import PER_NODE, Gpu
from pipeline.plan.memory import BYTES, Memory, Models, compute_element, kv_bytes_per_token
from pipeline.plan.models import ModelFiles

OF_FLOPS = 0.4
"""Part of a GPU's operations per second that is reached."""
OF_BANDWIDTH = 0.6
"""Part of its memory's rate that an engine reaches."""
IN_NODE, BETWEEN_NODES, TO_HOST = 200e9, 40e9, 25e9
"""Bytes per second of a GPU to others of its node, to other nodes, and to the host."""
OF_HOST = 100e9
"""Bytes per second of a node's own memory."""
PUBLISHED = 1.9e9
"""Bytes per second from the optimiser's step to an engine that has loaded."""

ASSUMED = (
    "rows of full length, 2 operations a parameter and token in each pass (an update is 3 or 4), "
    f"{OF_FLOPS:.0%} of the datasheet's operations and {OF_BANDWIDTH:.0%} of its bytes a second, "
    f"{IN_NODE / 1e9:.0f} GB/s between GPUs of a node of {PER_NODE}, {BETWEEN_NODES / 1e9:.0f} between nodes, "
    f"{TO_HOST / 1e9:.0f} to the host, {OF_HOST / 1e9:.0f} in a node's memory; publishing at {PUBLISHED / 1e9:g} GB/s; "
    "no latencies"
)
"""The assumptions of the estimate, in words."""


@dataclass(frozen=True)
class Times:
    """Seconds of one iteration, phase by phase."""

    generation: float
    log_probs: float
    """Of the old policy, and of pools on GPUs."""
    update: float
    publishing: float
    beside: float
    """Of log-probs, update and publishing, seconds that may pass while engines generate."""

    @property
    def iteration(self) -> float:
        """Seconds of all phases, some of which run at the same time."""
        train = self.log_probs + self.update + self.publishing
        return self.generation + train - min(self.generation, self.beside)


def times(config: Config, models: Models, memory: Memory, gpu: Gpu) -> Times | None:
    """The estimate; None where the train workers or engines use CPUs, or the speed of the GPU is not known."""
    engines = uses_engines(config)
    if gpu.flops is None or gpu.bandwidth is None or not config.trainer.use_gpu:
        return None
    if engines and not config.rollout.num_gpus:
        return None
    rate = OF_FLOPS * gpu.flops
    rows = config.data.train_batch_size * config.rollout.n
    length = config.data.longest_row
    own = [models.policy] * (config.actor.old_log_probs == "recompute")
    own += [models.reference or models.policy] * trains_beside_reference(config)
    log_probs = sum(_passes(config, config.actor, model, rate, 1) for model in own)
    for name, pool in scorers(config).items():
        model = {"reference": models.reference, "reward_model": models.reward, "value": models.critic}.get(
            name, models.policy
        )
        if model and pool.num_gpus:
            # A reward model computes one number for a row.
            operations = _operations(model, length, config.data.max_response_length * (name != "reward_model"))
            log_probs += rows * operations / rate / pool.num_workers
    update = _update(config, config.actor, models.policy, memory.train_optimizer, rate)
    if uses_critic(config) and models.critic:
        update += _update(config, config.critic, models.critic, memory.critic_optimizer, rate)
    publishing = memory.version / PUBLISHED if engines else 0.0
    beside = 0.0
    if config.algorithm.max_staleness:
        beside = log_probs + update + publishing
    elif streams_gradients(config):
        beside = log_probs + update / UpdateShape.of(config, config.actor).steps
    return Times(
        generation=_generation(config, models.policy, memory, gpu, gpu.bandwidth) if engines else 0.0,
        log_probs=log_probs,
        update=update,
        publishing=publishing,
        # On the same GPUs each would only slow the other down.
        beside=0.0 if shares_gpus(config) else beside,
    )


def _operations(model: ModelFiles, length: int, predicted: int) -> float:
    """Operations of a forward pass over one row, with the head for the tokens of its response."""
    head = model.size("vocab_size") * model.size("hidden_size")
    attention = 2 * model.layers * model.queries * length**2
    return 2 * model.active * length + 2 * head * predicted + attention


def _update(config: Config, part: ActorConfig | CriticConfig, model: ModelFiles, state: int, rate: float) -> float:
    """Seconds of all optimiser steps of an iteration, with `state` bytes of optimiser state on each worker."""
    forwards = 3 + config.model.enable_gradient_checkpointing - (config.model.lora.rank > 0)
    shape = UpdateShape.of(config, part)
    # The state of a step comes to the GPU and goes back, or all workers of a node step in host memory: AdamW reads and
    # writes weights and both averages, and reads gradients.
    workers = min(PER_NODE, config.trainer.num_workers)
    moved = {"optimizer": 2 * state / TO_HOST, "all": workers * state / 8 * 28 / OF_HOST}
    step = moved.get(part.fsdp.offload, 0.0)
    return shape.epochs * _passes(config, part, model, rate, forwards) + shape.steps * step


def _passes(config: Config, part: ActorConfig | CriticConfig, model: ModelFiles, rate: float, forwards: int) -> float:
    """Seconds of passes over all rows of an iteration, each as long as so many forward passes."""
    data, parallel, workers = config.data, config.actor.parallel, config.trainer.num_workers
    length = data.longest_row
    rows, shape = data.train_batch_size * config.rollout.n, UpdateShape.of(config, part)
    operations = rows * _operations(model, length, data.max_response_length) * forwards / workers
    tokens = rows * length * parallel.ranks_with_same_rows / workers
    count = shape.mini_batches * math.ceil(tokens / shape.mini_batches / shape.max_tokens)
    shards, trains = workers // (parallel.replicate * parallel.tensor), forwards > 1
    # Weights come for the forward pass and again, but for an embedding, for the backward pass; gradients go once.
    come = model.parameters + trains * (model.parameters - model.embedding)
    go = model.parameters if trains and not config.model.lora.rank else 0
    element = compute_element(config, part.fsdp)
    gathered = (come * element + go * BYTES[part.fsdp.reduce_dtype]) / parallel.tensor * (shards - 1) / shards
    own = (come + go) / shards / parallel.tensor * BYTES[config.model.dtype]
    waiting = own / TO_HOST if part.fsdp.offload == "all" else 0.0
    computing = operations / rate + tokens / parallel.sequence * element * _exchanges(config, model, trains)
    return max(computing, count * gathered / _link(shards * parallel.tensor), count * waiting)


def _exchanges(config: Config, model: ModelFiles, trains: bool) -> float:
    """Seconds that all exchanges in the layers of a pass take for a token of a rank, whose numbers have one byte; a
    worker does not compute meanwhile."""
    parallel, width = config.actor.parallel, model.size("hidden_size")
    tensor, sequence = parallel.tensor, parallel.sequence
    # A sum sends its numbers twice. Tokens go to experts and come back, and all ranks get all outputs.
    experts = 2 * model.routes / tensor + 1
    forward, backward = (2 + experts, 6 + experts) if parallel.expert > 1 else (4, 10)
    forwards = 1 + (trains and config.model.enable_gradient_checkpointing)
    summed = (forwards * forward + trains * backward) * width * (tensor - 1) / tensor
    heads = model.size("num_key_value_heads", model.size("num_attention_heads", 1)) // tensor
    keys = model.keys * sequence // math.gcd(heads, sequence)
    swapped = (forwards + trains) * 2 * (model.queries + keys) / tensor * (sequence - 1) / sequence
    return model.layers * (summed / _link(tensor) + swapped / _link(tensor * sequence))


def _link(ranks: int) -> float:
    """Bytes per second of a GPU to others of so many neighbouring ranks."""
    return IN_NODE if ranks <= PER_NODE else BETWEEN_NODES


def _generation(config: Config, model: ModelFiles, memory: Memory, gpu: Gpu, bandwidth: float) -> float:
    """Seconds in which the engines turn an iteration's prompts into responses of full length."""
    data, rollout = config.data, config.rollout
    prompt, response, parts = data.max_prompt_length, data.max_response_length, rollout.tensor_parallel_size
    rows = data.train_batch_size * rollout.n / rollout.num_engines
    kv_of_token = kv_bytes_per_token(model, config)
    room = gpu.memory * rollout.gpu_memory_utilization - memory.engine_weights
    fit = room / (kv_of_token * (prompt + response)) if kv_of_token else math.inf
    together = max(1.0, min(rows, rollout.max_num_seqs, fit))
    share = model.routes / model.experts[1] if model.experts[1] else 1.0
    element = BYTES[rollout.dtype]
    # With many tokens in a step nearly all experts are read.
    read = (model.parameters - model.routed + model.routed * (1 - (1 - share) ** together)) * element / parts
    reading = (read + together * kv_of_token * (prompt + response / 2)) / (OF_BANDWIDTH * bandwidth)
    assert gpu.flops is not None
    rate = OF_FLOPS * gpu.flops * parts
    head = 2 * model.size("vocab_size") * model.size("hidden_size")
    attention = 4 * model.layers * model.queries * (prompt + response / 2)
    computing = together * (2 * model.active + head + attention) / rate
    prompts = rows / (rollout.n if rollout.enable_prefix_caching else 1)
    prefill = prompts * _operations(model, prompt, 0) / rate
    # Two sums of the outputs in each layer.
    summed = 4 * model.layers * model.size("hidden_size") * (parts - 1) / parts * element / _link(parts)
    tokens = prompts * prompt + rows * response
    return prefill + rows / together * response * max(reading, computing) + tokens * summed
