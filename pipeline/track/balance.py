"""Advice on the balance of a run: whether the engines wait for the trainer, or the trainer for the engines.

Engines wait if admission holds chunks back until the trainer has made a version (`perf/rollout_idle`). The trainer
waits for rows (`perf/train_idle`). Both metrics are fractions of an iteration's time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

ROLLOUT_IDLE = "perf/rollout_idle"
TRAIN_IDLE = "perf/train_idle"
MATTERS = 0.1
"""Fraction of the time from which waiting is worth a change of settings."""
WARMUP_ITERATIONS = 2
"""Number of first iterations that the advice leaves out, since engines and caches start in them."""


def idle_shares(metrics: Mapping[str, float]) -> str:
    """Format the idle fractions of one iteration as percentages; "" if neither is known."""
    sides = (("engines", ROLLOUT_IDLE), ("trainer", TRAIN_IDLE))
    known = [f"{side} {metrics[name]:.0%}" for side, name in sides if name in metrics]
    return f"idle: {', '.join(known)}" if known else ""


def advice(records: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence on which side limits the run, and a remedy; None if the records do not show it.

    Args:
        records: lines of the run's `metrics.jsonl`.
    """
    later = [record for record in records if ROLLOUT_IDLE in record and TRAIN_IDLE in record][WARMUP_ITERATIONS:]
    if not later:
        return None
    rollout, train = (sum(record[name] for record in later) / len(later) for name in (ROLLOUT_IDLE, TRAIN_IDLE))
    idle = f"engines idle {rollout:.0%}, trainer idle {train:.0%} of the time"
    if rollout < MATTERS and train < MATTERS:
        return f"{idle}: balanced"
    if rollout >= MATTERS and train >= MATTERS:
        return (
            f"{idle}: they wait for each other; raise algorithm.max_staleness to let engines generate ahead, or see "
            "whether trainer.stream_gradients can begin before an iteration is complete"
        )
    if train >= MATTERS:
        return (
            f"{idle}: rollouts limit; add engines (rollout.num_engines) or chunks in flight, or shorten responses "
            "(algorithm.max_staleness makes busy engines no faster)"
        )
    return (
        f"{idle}: training limits; add train workers (trainer.num_workers), give them what some engines have, or raise "
        "actor.ppo_max_token_len_per_gpu"
    )
