"""Timings of the train loop, and reasons to stop a run."""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pyarrow as pa
import torch.distributed as dist

from pipeline.config import Config
from pipeline.stats import Stat, Stats

TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
"""Pattern in torch's error for a collective operation that took too long."""


class CollectiveTimeout(TimeoutError):
    """Error if another train worker did not reach a collective operation in time."""


def is_collective_timeout(error: RuntimeError) -> bool:
    """Return whether torch raised the error because a collective operation took too long."""
    of_torch = type(error) is RuntimeError or isinstance(error, dist.DistError)
    return of_torch and TIMED_OUT.search(str(error)) is not None


@contextmanager
def timed(timings: Stats, name: str) -> Iterator[None]:
    """Add the wall-clock seconds of the block to the metric `timing_s/{name}` in `timings`.

    When metrics of ranks are merged, the slowest rank's time is kept.
    """
    begun = time.perf_counter()
    yield
    key = f"timing_s/{name}"
    before = timings[key].values[0] if key in timings else 0.0
    timings[key] = Stat("max", (before + time.perf_counter() - begun,))


def stop_reason(metrics: Mapping[str, float], table: pa.Table, iteration: int, config: Config) -> str | None:
    """Return a sentence on why the run must end after an iteration; None if it may continue.

    Args:
        metrics: the iteration's metrics over all ranks.
        table: this rank's rows of the iteration, for an example of a reward error.
        iteration: number of the iteration.
        config: has the limits `reward.max_error_rate` and `trainer.max_log_prob_gap`.
    """
    limit = config.reward.max_error_rate
    if metrics["reward/error_rate"] > limit:
        errors = table["reward_error"].drop_null()
        example = f"; one of them: {errors[0].as_py()}" if len(errors) else ""
        return (
            f"the reward failed for {metrics['reward/error_rate']:.0%} of the rows of iteration {iteration}, more than "
            f"reward.max_error_rate={limit:.0%}{example}"
        )
    max_gap, gap = config.trainer.max_log_prob_gap, metrics.get("training/rollout_log_probs_diff_max", 0.0)
    if max_gap is not None and gap > max_gap:
        return (
            f"engine and trainer disagree about a token's log-prob by {gap:.2g} in iteration {iteration}, more than "
            f"trainer.max_log_prob_gap={max_gap:g}: the engine does not run the published weights, or computes in "
            "another precision (rollout.dtype, actor.fsdp.param_dtype)"
        )
    return None
