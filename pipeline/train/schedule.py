"""Learning-rate schedules, relative to the peak rate, and notes on jumps of the rate when a run is continued."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.config.learner import OptimConfig

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 0.0,
    "cosine": lambda progress: (1 - math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: progress,
}
"""`optim.lr_scheduler_type` to a function of the decay's progress, from 0 to 1, that returns the fraction of the fall
from peak to minimum rate that is done, from 0 to 1."""


def rate_factor(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Return a function from the number of an optimiser step, from 0, to its learning rate divided by `lr`.

    The factor rises linearly from `1 / warmup` to 1 in the warm-up, then falls by the schedule to `min_lr_ratio` at the
    last of `total_steps` steps.
    """
    shape, warmup = SHAPES[config.lr_scheduler_type], config.warmup(total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
        return 1 - (1 - config.min_lr_ratio) * shape(progress)

    return factor


def jumps(progress: dict[str, Any], schedules: dict[str, tuple[OptimConfig, int]]) -> Iterator[str]:
    """Yield one sentence for each learner whose learning rate jumps when training continues from a checkpoint.

    A jump is a change by at least 1 % of the peak rate, for example because the run now has another number of steps.

    Args:
        progress: content of the checkpoint's `progress.json`. Older versions did not write the learning rates.
        schedules: learner's name to its settings and total number of optimiser steps from now on.
    """
    for name, (optim, steps) in schedules.items():
        done, rate = progress["scheduler_steps"].get(name), progress.get("learning_rates", {}).get(name)
        if not done or rate is None:
            continue
        factor = rate_factor(optim, steps)(done)
        if abs(factor * optim.lr - rate) >= 0.01 * optim.lr:
            yield (
                f"the learning rate of the {name} goes on at {factor * optim.lr:.3g}, which is {factor:.2f} of its "
                f"peak, and stood at {rate:.3g}: its {optim.lr_scheduler_type} schedule now has {steps:,} optimiser "
                f"steps, with {done:,} done"
            )
