"""Engines, replicas and train workers on their devices: settings of sizes and GPUs that are together impossible."""

import importlib.util
import math
from collections.abc import Iterator

from pipeline.config import Config
from pipeline.derived import scorers, uses_engines


def problems(config: Config) -> Iterator[str]:
    """One sentence for each problem; single values are valid."""
    rollout = config.rollout
    if not rollout.fewest <= rollout.num_engines <= rollout.most:
        yield (
            f"rollout.num_engines={rollout.num_engines} must lie between rollout.min_engines={rollout.fewest} and "
            f"rollout.max_engines={rollout.most}: it is the number of engines that the run begins with"
        )
    if rollout.num_gpus > 1:
        yield (
            f"rollout.num_gpus={rollout.num_gpus:g}: an engine uses one GPU or a part of one; to split its model over "
            f"several, set rollout.num_gpus=1 and rollout.tensor_parallel_size={math.ceil(rollout.num_gpus)}"
        )
    elif rollout.tensor_parallel_size > 1:
        yield from _split_engines(config)
    yield from _shared_gpus(config)
    if config.trainer.weight_transport == "nixl":
        yield from _nixl(config)
    if rollout.num_gpus > 0 and rollout.gpu_memory_utilization == 0:
        yield "rollout.gpu_memory_utilization=0 leaves a GPU engine no memory; set it above 0"
    if rollout.num_gpus == 0 and rollout.dtype == "float16" and uses_engines(config):
        yield "rollout.dtype=float16 is not supported by a CPU engine (rollout.num_gpus=0); set float32 or bfloat16"
    for name, pool in scorers(config).items():
        if pool.num_gpus > 1:
            yield f"scoring.{name}.num_gpus={pool.num_gpus:g}: a replica uses one GPU or a part of one"


def _split_engines(config: Config) -> Iterator[str]:
    rollout = config.rollout
    named = f"rollout.tensor_parallel_size={rollout.tensor_parallel_size}"
    if rollout.num_gpus == 0 and uses_engines(config):
        yield f"{named} splits a model over GPUs and rollout.num_gpus=0; set that to 1, or the size to 1"
    elif rollout.num_gpus != 1:
        yield (
            f"{named} with rollout.num_gpus={rollout.num_gpus:g}: each part of a model has a GPU of its own; set "
            "rollout.num_gpus=1"
        )
    if rollout.elastic:
        yield (
            f"{named} with rollout.min_engines={rollout.fewest} and rollout.max_engines={rollout.most}: engines of "
            "several GPUs keep their places for the whole run; leave both at null"
        )
    for key in ("tensor_parallel_size", "distributed_executor_backend"):
        if key in rollout.engine_kwargs:
            yield f"rollout.engine_kwargs.{key} is set by rollout.tensor_parallel_size; leave it out"


def _shared_gpus(config: Config) -> Iterator[str]:
    rollout, trainer = config.rollout, config.trainer
    share = trainer.gpus_per_worker
    if not 0 < share <= 1:
        yield (
            f"trainer.gpus_per_worker={share:g} must be above 0 and at most 1: a train worker uses one GPU or a part "
            "of one"
        )
    elif trainer.use_gpu and trainer.num_workers > 1 and share <= 0.5:
        yield (
            f"trainer.gpus_per_worker={share:g}: Ray could give two of the trainer.num_workers={trainer.num_workers} "
            "workers one GPU, which NCCL refuses; set it above 0.5, such as 0.6 beside rollout.num_gpus=0.4"
        )
    if not rollout.sleep or not uses_engines(config):
        return
    if rollout.num_gpus == 0:
        yield "rollout.sleep=true is for engines on GPUs (rollout.num_gpus above 0); a CPU engine cannot sleep"
    if config.algorithm.max_staleness > 0:
        yield (
            f"rollout.sleep=true with algorithm.max_staleness={config.algorithm.max_staleness}: engines that generate "
            "ahead are awake while the trainer computes; set one of them to its default"
        )
    if "enable_sleep_mode" in rollout.engine_kwargs:
        yield "rollout.engine_kwargs.enable_sleep_mode is set by rollout.sleep; leave it out"


def _nixl(config: Config) -> Iterator[str]:
    if importlib.util.find_spec("nixl") is None:
        yield "trainer.weight_transport=nixl needs the Python package nixl on every node: pip install nixl"
    for name, value in config.trainer.env_vars.items():
        if "expandable_segments:true" in str(value).lower():
            yield (
                f"trainer.weight_transport=nixl with trainer.env_vars.{name}={value}: NIXL cannot register memory that "
                "is allocated so; leave one of them out"
            )
