"""Check whether the estimated memory of a run fits its GPUs."""

from collections.abc import Iterator

from pipeline.config import Config
from pipeline.derived import replicas, scorer_key, uses_engines
from pipeline.plan.gpus import Gpu
from pipeline.plan.memory import Memory, shown

FULL = 0.9
"""Fraction of a GPU's memory that an estimate may fill; allocators and communication need the rest."""


def shares_gpus(config: Config) -> bool:
    """Return True if engines and train workers are on the same GPUs."""
    return uses_engines(config) and config.trainer.gpus < 1 and 0 < config.rollout.num_gpus < 1


def too_large(config: Config, memory: Memory, gpu: Gpu) -> Iterator[str]:
    """Yield one sentence per part of the run (train workers, engines, replicas) that does not fit the GPU `gpu`."""
    limit, rollout = FULL * gpu.memory, config.rollout
    engine = rollout.gpu_memory_utilization * gpu.memory
    most = f"and an estimate may fill {shown(limit)} of it"
    if config.trainer.use_gpu:
        if memory.train_peak > limit:
            yield f"a train worker needs {shown(memory.train_peak)} of {gpu.words}, {most}"
        elif shares_gpus(config):
            beside = memory.train_idle if rollout.sleep else memory.train_peak
            when = "between updates" if rollout.sleep else "with an engine that never sleeps"
            if beside + engine > limit:
                yield (
                    f"a train worker {when} and an engine need {shown(beside)} + {shown(engine)} "
                    f"(rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g}) of {gpu.words}, {most}"
                )
    for name, pool in replicas(config).items():
        weights, part = memory.scorer_weights.get(name) or 0, pool.num_gpus * gpu.memory
        if pool.num_gpus and weights > FULL * part:
            yield (
                f"a {name} replica has {shown(weights)} of weights, and {scorer_key(name)}.num_gpus={pool.num_gpus:g} "
                f"is {shown(part)} of {gpu.words}"
            )
    together = min(rollout.num_engines, int(1 / rollout.num_gpus)) if 0 < rollout.num_gpus < 1 else 1
    if uses_engines(config) and together > 1 and not shares_gpus(config) and together * engine > limit:
        yield (
            f"{together} engines of rollout.num_gpus={rollout.num_gpus:g} on one GPU need {together} x {shown(engine)} "
            f"(rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g}) of {gpu.words}, {most}"
        )
    if uses_engines(config) and rollout.num_gpus:
        # vLLM starts only if its cache holds at least one sequence of full length.
        needed = memory.engine_weights + memory.engine_kv_needed / rollout.max_num_seqs
        if needed > FULL * engine:
            yield (
                f"an engine needs {shown(needed)} of each GPU for weights and one sequence, and "
                f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g} gives it {shown(engine)} of "
                f"{gpu.words}"
            )
