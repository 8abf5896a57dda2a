"""Compare the memory that a run on CPUs needs with the memory of this machine."""

import copy
import os
from pathlib import Path

from pipeline.config import Config
from pipeline.config.learner import FSDPConfig
from pipeline.derived import replicas, uses_engines
from pipeline.plan.gpus import GIB
from pipeline.plan.memory import Memory, Models, estimate, shown

PROCESS = 0.7 * GIB
"""Bytes of a process with torch and Ray, before it has a model."""
ENGINE = 1.8 * GIB
"""Bytes of an engine's process, in addition to weights and KV cache."""
RAY = 2.5 * GIB
"""Bytes of Ray's own processes, the driver, and the actors of the other stages."""
SLOW_PRODUCTS = (
    "this processor has no instructions for bfloat16 (amx_bf16, avx512_bf16), so a step may take many times as long as "
    "in float32; set "
)
"""Beginning of a warning; the setting that helps follows."""
CGROUPS = Path("/sys/fs/cgroup")
LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Files with the memory limit of a container: version 2 of cgroups, and version 1."""


def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return True if this machine's processor has instructions for matrix products in bfloat16 (x86 or ARM)."""
    try:
        return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(cpuinfo.read_text().split())
    except OSError:
        return False


def slow_products(model_dtype: str, fsdp: FSDPConfig, use_gpu: bool) -> bool:
    """Return True if a train worker on a processor like this one would compute in bfloat16 without instructions for
    it."""
    return not use_gpu and fsdp.compute_dtype(model_dtype, use_gpu) == "bfloat16" and not multiplies_bfloat16()


def machine_memory() -> int:
    """Return the bytes of memory that this machine has, or the limit of its container if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in LIMITS:
        try:
            limits.append(int((CGROUPS / name).read_text()))
        except (OSError, ValueError):
            # The file is missing, or holds "max".
            continue
    return min(limits)


def needed(config: Config, memory: Memory) -> dict[str, float]:
    """Return the bytes that the parts of a run need on one machine without GPUs, by part."""
    rollout, workers = config.rollout, config.trainer.num_workers
    parts = {_count(workers, "train worker"): workers * (memory.train_peak + memory.train_kept + PROCESS)}
    if uses_engines(config):
        engine = memory.engine_weights + rollout.cpu_kvcache_space_gb * GIB + ENGINE
        parts[_count(rollout.fewest, "engine")] = rollout.fewest * engine
    for name, pool in replicas(config).items():
        weights = memory.scorer_weights.get(name) or 0
        parts[_count(pool.num_workers, f"{name} replica")] = pool.num_workers * (weights + PROCESS)
    # While engines and replicas load a version, the next one may be published.
    published = 2 * (memory.version + (memory.scorer_weights.get("value") or 0))
    return parts | {"Ray with rows and weights": RAY + memory.rows + published}


def too_large(config: Config, models: Models, available: int) -> str | None:
    """Return a sentence if a run on CPUs needs more than `available` bytes; None if it fits, or uses GPUs."""
    if config.trainer.use_gpu or config.rollout.num_gpus:
        return None
    parts = needed(config, estimate(config, models))
    if sum(parts.values()) <= available:
        return None
    listed = ", ".join(f"{name} {shown(size)}" for name, size in parts.items())
    return (
        f"the run needs about {shown(sum(parts.values()))} of memory and this machine has {shown(available)} "
        f"({listed}); {_remedy(config, models, available)}"
    )


def _remedy(config: Config, models: Models, available: int) -> str:
    """Return settings with which the run fits, as advice."""
    smaller = copy.deepcopy(config)
    longest = config.data.longest_row
    while (tokens := smaller.actor.ppo_max_token_len_per_gpu // 2) >= longest:
        smaller.actor.ppo_max_token_len_per_gpu = tokens
        if sum(needed(smaller, estimate(smaller, models)).values()) <= available:
            return f"set actor.ppo_max_token_len_per_gpu={tokens}"
    return (
        "set model.enable_gradient_checkpointing=true or model.lora.rank, lower rollout.cpu_kvcache_space_gb, or "
        "choose a smaller model"
    )


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number > 1)}"
