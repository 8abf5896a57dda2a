"""Metrics of an iteration's cost: tokens per second, time per token, memory, and the balance of tokens over ranks."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from pipeline.rows import flat, prompt_tokens
from pipeline.stats import Stat, Stats, summary

GIB = 2**30
PHASES = ("old_log_prob", "update_critic", "update_actor")
"""Phases of the trainer that process the tokens of prompts and responses."""


def derived(
    metrics: dict[str, float], prompt_tokens: float, response_tokens: float, policy_tokens: float, workers: int
) -> dict[str, float]:
    """Compute rates from an iteration's finished `metrics`. A rate is left out if its inputs are missing.

    Args:
        metrics: merged metrics of all ranks, with `timing_s/step`.
        prompt_tokens: number of prompt tokens in the iteration's rows on all ranks.
        response_tokens: number of response tokens in the same rows.
        policy_tokens: number of the response tokens that the engines sampled.
        workers: number of train workers.
    """
    total, seconds = prompt_tokens + response_tokens, metrics["timing_s/step"]
    found = {
        "perf/total_num_tokens": total,
        "perf/time_per_step": seconds,
        "perf/throughput": total / seconds / workers,
    }
    if "timing_s/gen" in metrics:
        found["perf/train_idle"] = min(1.0, metrics["timing_s/gen"] / seconds)
    if generation := metrics.get("rollout/generate_s/max"):
        found["perf/rollout_tokens_per_s"] = policy_tokens / generation
    for phase, tokens in {"gen": policy_tokens, **dict.fromkeys(PHASES, total)}.items():
        if f"timing_s/{phase}" in metrics and tokens:
            found[f"timing_per_token_ms/{phase}"] = metrics[f"timing_s/{phase}"] * 1000 / tokens
    return found


def memory_metrics(device: torch.device) -> Stats:
    """Measure this process's memory in GiB: main memory now, and the GPU's peak so far. Merged, the largest rank
    counts."""
    # `resource.getrusage` does not fit: its peak begins with the peak of the parent process. The second field is the
    # resident memory in pages.
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    stats = {"perf/cpu_memory_used_gb": Stat("max", (resident / GIB,))}
    if device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        stats["actor/perf/max_memory_allocated_gb"] = Stat("max", (allocated / GIB,))
        stats["actor/perf/max_memory_reserved_gb"] = Stat("max", (reserved / GIB,))
    return stats


def sequence_balance(table: pa.Table) -> Stats:
    """Return the number of tokens (prompts and responses) in one rank's rows as a metric.

    Merged over ranks, it becomes the smallest, largest and mean number.
    """
    tokens = prompt_tokens(table) + len(flat(table, "response_ids")[0])
    return summary(np.array([tokens]), "global_seqlen")
