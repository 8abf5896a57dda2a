"""Suggest settings for training a model on a number of GPUs: the first combination that fits and passes the checks.

Combinations of these are tried, in this order:

    memory saving       none; gradient checkpointing; checkpointing and offload. If none of them fits: the same with
                        sequence parallelism. If these do not fit either: adapters
    layout              all GPUs train and generate in turn; or half of them train and half generate
    mesh                one copy of the weights per node; or one copy over all workers

A memory saving costs speed, so combinations with fewer savings are tried first.
"""

import contextlib
import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config import Config, ConfigError
from pipeline.config.bounds import as_argument
from pipeline.config.schema import value_of
from pipeline.derived import MOST_PROMPTS, scorer_key, scorers, uses_critic, uses_engines, whole_chunk
from pipeline.plan.checks import check
from pipeline.plan.fit import FULL, too_large
from pipeline.plan.gpus import GIB, PER_NODE, Gpu
from pipeline.plan.memory import BYTES, Models, estimate, read_models, shown
from pipeline.plan.models import ModelFiles
from pipeline.plan.parallel import HEADS

Settings = Mapping[str, Any]
"""Values of settings, by dotted key."""

ALONE = 0.85
"""Fraction of a GPU's memory for an engine that does not share the GPU."""
WEIGHTS = 0.6
"""Maximum fraction of that engine's memory that its weights may take; the rest is KV cache."""
HOST = 250 * GIB
"""Maximum host memory of a train worker, in bytes: nodes with eight GPUs mostly have 2 TB."""
SPLITS = (8, 4, 2)
"""Numbers of GPUs over which layers, positions or an engine's model may be divided, within one node."""
OFF: Settings = {
    "model.enable_gradient_checkpointing": False,
    "model.activation_offload": False,
    "actor.fsdp.offload": "none",
    "actor.parallel.pipeline": 1,
    "rollout.min_engines": None,
    "rollout.max_engines": None,
}
"""Settings of every combination that does not set them itself: no savings, no stages, no elastic pool."""
CHECKPOINTS: Settings = {"model.enable_gradient_checkpointing": True}
SAVINGS: tuple[Settings, ...] = (
    {},
    CHECKPOINTS,
    {**CHECKPOINTS, "actor.fsdp.offload": "optimizer"},
    {**CHECKPOINTS, "actor.fsdp.offload": "optimizer", "model.activation_offload": True},
    {**CHECKPOINTS, "actor.fsdp.offload": "all"},
)
"""Settings that save memory; the one that costs the least speed is first."""
LORA: Settings = {**CHECKPOINTS, "model.lora.rank": 32, "model.dtype": "bfloat16"}
ADAPTERS: tuple[Settings, ...] = (LORA, {**LORA, "model.activation_offload": True})
"""Settings for training with adapters, tried if training all weights does not fit."""


def suggest(config: Config, models: Models, gpus: int, gpu: Gpu) -> Settings | None:
    """Return settings with which `config` fits `gpus` GPUs of the kind `gpu`; None if nothing fits.

    Settings of data, algorithm and scoring pools are not changed.
    """
    left = gpus - _of_replicas(config)
    # Experts cannot have adapters.
    more = () if config.model.lora.rank or models.policy.experts[1] else ADAPTERS
    for savings, sequence in (*((SAVINGS, size) for size in (1, *reversed(SPLITS))), (more, 1)):
        layouts = (_layouts(config, models, left, gpu, saving, sequence) for saving in savings)
        for settings in itertools.chain.from_iterable(layouts):
            candidate = laid_over(config, settings)
            memory = estimate(candidate, models)
            if memory.offloaded + memory.train_kept <= HOST and not list(too_large(candidate, memory, gpu)):
                with contextlib.suppress(ConfigError):
                    check(candidate)
                    return settings
    return None


def laid_over(config: Config, settings: Settings) -> Config:
    """Return a copy of `config` with the values of `settings`."""
    changed = copy.deepcopy(config)
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        setattr(value_of(changed, section), name, value)
    return changed


def suggested(config: Config, gpus: int, gpu: Gpu) -> tuple[str, str]:
    """Return a line for the plan's table as (name, text). The text has the suggested settings that differ from
    `config`.

    Raises:
        ValueError: a file of a model is damaged.
    """
    name, models = f"suggested for {gpus} x {gpu.name}", read_models(config)
    if models is None:
        return name, "nothing: model.path is not a local folder with safetensors files, whose sizes are needed"
    settings = suggest(config, models, gpus, gpu)
    if settings is None:
        taken = _of_replicas(config)
        pools = ", ".join(scorer_key(key) for key, pool in scorers(config).items() if pool.num_gpus)
        replicas = f"the {taken} GPUs of replicas ({pools})"
        if taken >= gpus:
            return name, f"nothing: {replicas} leave none to train; lower their num_workers, or take more GPUs"
        beside = f" beside {replicas}" if taken else ""
        return name, f"nothing: no layout fits{beside}; take more GPUs, or a lower actor.ppo_max_token_len_per_gpu"
    changed = (f"{key}={as_argument(value)}" for key, value in settings.items() if value_of(config, key) != value)
    memory = estimate(laid_over(config, settings), models)
    waiting = memory.offloaded + memory.train_kept
    host = f" and {shown(waiting)} of host memory" if waiting else ""
    words = " ".join(changed) or "the settings as they are"
    return name, f"{words} (a train worker: {shown(memory.train_peak)} of its GPU{host})"


def _of_replicas(config: Config) -> int:
    """Return the number of GPUs of the scoring replicas."""
    return math.ceil(sum(pool.num_workers * pool.num_gpus for pool in scorers(config).values()))


def _layouts(
    config: Config, models: Models, gpus: int, gpu: Gpu, saving: Settings, sequence: int
) -> Iterator[Settings]:
    """Yield settings of train workers and engines, one per layout and mesh.

    Args:
        config: settings of the run.
        models: sizes of the run's models.
        gpus: number of GPUs for train workers and engines.
        gpu: kind of these GPUs.
        saving: settings that save memory.
        sequence: number of sequence-parallel workers.
    """
    parallel = config.actor.parallel
    positions = {
        "actor.parallel.sequence": sequence,
        "actor.ppo_max_token_len_per_gpu": -(-config.actor.ppo_max_token_len_per_gpu * parallel.sequence // sequence),
    }
    lora, engines = "model.lora.rank" in saving or config.model.lora.rank > 0, uses_engines(config)
    # Engines that generate ahead never sleep, and would slow down train workers on the same GPUs.
    turns = gpus == 1 or config.algorithm.max_staleness == 0
    for together in (True, False) if turns else (False,):
        most = gpus if together or not engines else gpus // 2
        most = min(most, config.data.train_batch_size)
        workers = next((count for count in range(most, 0, -1) if _chunk(config, count)), 0)
        for mesh in _meshes(models.policy, workers, lora, sequence):
            train = {
                "trainer.use_gpu": True,
                "trainer.num_workers": workers,
                "trainer.gpus_per_worker": 0.6 if together and engines else 1.0,
                "rollout.chunk_prompts": config.rollout.chunk_prompts and _chunk(config, workers),
                **mesh,
                **positions,
                **OFF,
                **saving,
                **({"critic.fsdp.offload": saving.get("actor.fsdp.offload", "none")} if uses_critic(config) else {}),
            }
            if not engines:
                yield train
            elif together:
                yield from _sharing(config, models, workers, gpu, train)
            else:
                yield {**train, **_engines(config, models.policy, gpus - workers, gpu)}


def _sharing(config: Config, models: Models, workers: int, gpu: Gpu, train: Settings) -> Iterator[Settings]:
    """Yield the settings `train` with one engine on the GPU of each train worker, which gets the memory that the worker
    leaves; nothing if that is too little."""
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
    """Return settings for engines on `gpus` GPUs that only engines use.

    An engine gets the smallest number of GPUs that leaves enough memory for its KV cache.
    """
    weights, heads = model.parameters * BYTES[config.rollout.dtype], model.size("num_attention_heads", 1)
    fitting = (size for size in (1, *reversed(SPLITS)) if weights / size <= WEIGHTS * ALONE * gpu.memory)
    size = next((size for size in fitting if gpus >= size and heads % size == 0), 1)
    return {
        "rollout.num_engines": gpus // size,
        "rollout.num_gpus": 1,
        "rollout.tensor_parallel_size": size,
        "rollout.sleep": False,
        "rollout.gpu_memory_utilization": ALONE,
    }


def _meshes(model: ModelFiles, workers: int, lora: bool, sequence: int) -> Iterator[Settings]:
    """Yield settings of `actor.parallel` for `workers` train workers, with the shortest communication first.

    Dense models are only sharded, since gathering a layer takes less time than computing it. With a mixture of experts,
    workers would gather all experts though a token uses only a few, so experts are divided as far as the model and a
    node allow. Nothing is yielded if the workers cannot be divided.
    """
    tensor = 1
    if model.experts[1] and not lora:
        divided = [workers, model.experts[1], *(model.size(name) for name in HEADS)]
        tensor = next((size for size in SPLITS if not any(number % size for number in divided)), 1)
    nodes = workers // PER_NODE
    copies = (nodes, 1) if nodes and workers % PER_NODE == 0 else (1,)
    whole = workers > 0 and workers % (tensor * sequence) == 0 and tensor * sequence <= PER_NODE
    for replicate in dict.fromkeys(copies) if whole else ():
        yield {
            "actor.parallel.tensor": tensor,
            "actor.parallel.expert": tensor,
            "actor.parallel.replicate": replicate,
        }


def _chunk(config: Config, workers: int) -> int | None:
    return whole_chunk(config, workers, config.rollout.chunk_prompts or MOST_PROMPTS)
