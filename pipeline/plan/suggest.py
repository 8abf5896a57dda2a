"""Settings with which a model trains on a number of GPUs: the first of a few layouts that the plan accepts and that fits.

    for what saves memory, the cheapest first:  nothing, checkpointing, offloads, adapters
        for a layout:  half of the GPUs train and half generate; all do both in turn
            for a mesh:  copies of the shards in each node; one copy over all workers
"""

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config import Config, ConfigError
from pipeline.config.bounds import as_argument
from pipeline.config.schema import value_of
from pipeline.derived import scorers, uses_critic, uses_engines
from pipeline.plan.checks import check
from pipeline.plan.fit import FULL, too_large
from pipeline.plan.gpus import PER_NODE, Gpu
from pipeline.plan.memory import BYTES, Models, estimate
from pipeline.plan.models import ModelFiles
from pipeline.plan.parallel import HEADS

Settings = Mapping[str, Any]
"""Values by their dotted keys."""

ALONE = 0.85
"""Part of a GPU's memory for an engine that has it alone."""
SPLITS = (8, 4, 2)
"""Parts of a layer, or of an engine's model: powers of two within a node."""
SAVINGS: tuple[Settings, ...] = (
    {},
    {"model.enable_gradient_checkpointing": True},
    {"model.enable_gradient_checkpointing": True, "actor.fsdp.offload": "optimizer"},
    {
        "model.enable_gradient_checkpointing": True,
        "actor.fsdp.offload": "optimizer",
        "model.activation_offload": True,
    },
    {"model.enable_gradient_checkpointing": True, "actor.fsdp.offload": "all"},
    {"model.enable_gradient_checkpointing": True, "model.lora.rank": 32, "model.dtype": "bfloat16"},
)
"""What saves memory, the cheapest first."""


def suggest(config: Config, models: Models, gpus: int, gpu: Gpu) -> Settings | None:
    """Settings for training on `gpus` GPUs of one kind; None where nothing was found that fits.

    They are laid over `config`, whose data, algorithm and pools of scoring replicas stay as they are.
    """
    pools = sum(pool.num_workers * pool.num_gpus for pool in scorers(config).values())
    left = gpus - round(pools + 0.499)
    for saving in SAVINGS:
        for settings in _layouts(config, models, left, gpu, _complete(config, saving)):
            candidate = laid_over(config, settings)
            if list(too_large(candidate, estimate(candidate, models), gpu)):
                continue
            try:
                check(candidate)
            except ConfigError:
                continue
            return settings
    return None


def laid_over(config: Config, settings: Settings) -> Config:
    """A copy of `config` with other values of some keys."""
    changed = copy.deepcopy(config)
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        setattr(value_of(changed, section), name, value)
    return changed


def arguments(config: Config, settings: Settings) -> str:
    """The settings that differ from those of `config`, as arguments."""
    return " ".join(
        f"{key}={as_argument(value)}" for key, value in settings.items() if value_of(config, key) != value
    )


def _complete(config: Config, saving: Settings) -> Settings:
    """What saves memory, with the values of the keys that this leaves out; adapters that are wanted stay."""
    off: Settings = {
        "model.enable_gradient_checkpointing": False,
        "model.activation_offload": False,
        "actor.fsdp.offload": "none",
    }
    settings = {**off, **({} if config.model.lora.rank and "model.lora.rank" in saving else saving)}
    return settings | ({"critic.fsdp.offload": settings["actor.fsdp.offload"]} if uses_critic(config) else {})


def _layouts(config: Config, models: Models, gpus: int, gpu: Gpu, saving: Settings) -> Iterator[Settings]:
    """Train workers and engines on so many GPUs."""
    lora = saving.get("model.lora.rank", config.model.lora.rank) > 0
    engines = uses_engines(config)
    for together in (True,) if gpus == 1 else (False, True):
        workers = gpus if together or not engines else gpus // 2
        chunk = _chunk_prompts(config, workers)
        while workers > 1 and chunk is None:
            workers -= 1
            chunk = _chunk_prompts(config, workers)
        if workers < 1 or chunk is None:
            continue
        for parallel in _meshes(models.policy, workers, lora):
            train = {
                "trainer.use_gpu": True,
                "trainer.num_workers": workers,
                "trainer.gpus_per_worker": 0.6 if together and engines else 1.0,
                "rollout.chunk_prompts": chunk,
                **parallel,
                **saving,
            }
            if not engines:
                yield train
            elif together:
                yield from _sharing(config, models, workers, gpu, train)
            else:
                yield train | _engines(config, models.policy, gpus - workers, gpu)


def _sharing(config: Config, models: Models, workers: int, gpu: Gpu, train: Settings) -> Iterator[Settings]:
    """An engine beside each train worker, with the memory that the worker leaves."""
    sleep = config.algorithm.max_staleness == 0
    memory = estimate(laid_over(config, train), models)
    left = FULL - (memory.train_idle if sleep else memory.train_peak) / gpu.memory
    if left > 0.1:
        yield {
            **train,
            "rollout.num_engines": workers,
            "rollout.num_gpus": 0.4,
            "rollout.tensor_parallel_size": 1,
            "rollout.sleep": sleep,
            "rollout.gpu_memory_utilization": min(0.8, int(20 * left) / 20),
        }


def _engines(config: Config, model: ModelFiles, gpus: int, gpu: Gpu) -> Settings:
    """Engines on GPUs of their own: each as small as leaves half of its memory to the KV cache."""
    weights, heads = model.parameters * BYTES[config.rollout.dtype], model.size("num_attention_heads", 1)
    fitting = (size for size in (1, *reversed(SPLITS)) if weights / size <= ALONE * gpu.memory / 2)
    size = next((size for size in fitting if gpus >= size and heads % size == 0), 1)
    return {
        "rollout.num_engines": gpus // size,
        "rollout.num_gpus": 1,
        "rollout.tensor_parallel_size": size,
        "rollout.sleep": False,
        "rollout.gpu_memory_utilization": ALONE,
    }


def _meshes(model: ModelFiles, workers: int, lora: bool) -> Iterator[Settings]:
    """Meshes of the train workers, the one with the shortest ways first.

    Dense models are sharded alone: a pass gathers less than it computes. Of a mixture of experts it would gather all
    experts for a few, so these are divided as far as the model and a node allow.
    """
    tensor = 1
    if model.experts[1] and not lora:
        divided = [workers, model.experts[1], *(model.size(name) for name in HEADS)]
        tensor = next((size for size in SPLITS if not any(number % size for number in divided)), 1)
    nodes = workers // PER_NODE
    for replicate in dict.fromkeys((nodes if nodes and workers % PER_NODE == 0 else 1, 1)):
        yield {
            "actor.parallel.tensor": tensor,
            "actor.parallel.expert": tensor,
            "actor.parallel.replicate": replicate,
        }


def _chunk_prompts(config: Config, workers: int) -> int | None:
    """Prompts of a chunk with which every worker gets whole chunks of each mini-batch, if possible two; None where the
    batch cannot be shared evenly."""
    batch = config.data.train_batch_size
    minis = [config.actor.ppo_mini_batch_size, config.critic.ppo_mini_batch_size if uses_critic(config) else None]
    sizes = [batch, *(mini for mini in minis if mini)]
    most = min(config.rollout.chunk_prompts, max(1, batch // (2 * max(1, workers))))
    counts = itertools.chain(range(most, 0, -1)) if workers else ()
    return next((count for count in counts if not any(size % (count * workers) for size in sizes)), None)
