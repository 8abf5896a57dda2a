"""What an iteration costs: tokens per second, time per token, memory, and how even the ranks' shares of tokens are."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from pipeline.rows import flat, prompt_tokens
from pipeline.stats import Stat, Stats, summary

GIB = 2**30
PHASES = ("old_log_prob", "update_critic", "update_actor")
"""Phases of the trainer that go through prompt and response tokens."""


def derived(
    metrics: dict[str, float], prompt_tokens: float, response_tokens: float, policy_tokens: float, workers: int
) -> dict[str, float]:
    """Rates that follow from an iteration's finished `metrics`; those without their part, or tokens, are left out.

    Args:
        metrics: of all ranks, with `timing_s/step`.
        prompt_tokens: of the iteration's rows on all ranks.
        response_tokens: of the same.
        policy_tokens: those of them that the engines sampled.
        workers: train workers.
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
    """GiB that this process holds: in main memory now, and on its GPU at the most so far; the largest rank counts."""
    # Not `resource.getrusage`: its peak begins with that of the process that started this one. The second field is the
    # resident memory in pages.
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    stats = {"perf/cpu_memory_used_gb": Stat("max", (resident / GIB,))}
    if device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        stats["actor/perf/max_memory_allocated_gb"] = Stat("max", (allocated / GIB,))
        stats["actor/perf/max_memory_reserved_gb"] = Stat("max", (reserved / GIB,))
    return stats


def sequence_balance(table: pa.Table) -> Stats:
    """Tokens (prompts and responses) of one rank's rows; merged, the smallest, largest and mean number over ranks."""
    tokens = prompt_tokens(table) + len(flat(table, "response_ids")[0])
    return summary(np.array([tokens]), "global_seqlen")
