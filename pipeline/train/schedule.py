"""Learning-rate schedules as shares of the peak rate, and their jumps in a continued run of another length."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.config.learner import OptimConfig

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 0.0,
    "cosine": lambda progress: (1 - math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: progress,
}
"""Share of the way from the peak to the floor, over the progress of the decay from 0 to 1."""


def rate_factor(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate of each step, counted from 0, as a share of `lr`.

    Linear warm-up from `1 / warmup` to 1, then the schedule down to `min_lr_ratio` at the last of `total_steps` steps.
    """
    shape, warmup = SHAPES[config.lr_scheduler_type], config.warmup(total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
        return 1 - (1 - config.min_lr_ratio) * shape(progress)

    return factor


def jumps(progress: dict[str, Any], schedules: dict[str, tuple[OptimConfig, int]]) -> Iterator[str]:
    """Yield one sentence for each learner whose learning rate jumps when a checkpoint is continued.

    Args:
        progress: `progress.json` of the checkpoint. Older versions did not write the learning rates.
        schedules: settings and steps of the schedule from now on, by the learner's name.
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
