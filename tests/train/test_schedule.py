"""The schedules' values by hand, and the jump of a rate where a run is continued with another length."""

import math
from typing import Any

import pytest

from pipeline.config.learner import OptimConfig
from pipeline.train.schedule import jumps, rate_factor


def rates(total: int, **keys: Any) -> list[float]:
    """Share of the peak in each of `total` steps."""
    return [rate_factor(OptimConfig(**keys), total)(step) for step in range(total)]


def said(done: int, planned: int | None, now: int, **keys: Any) -> list[str]:
    """The lines for a checkpoint after `done` of `planned` steps that is continued with a schedule over `now`."""
    optim = OptimConfig(lr=1e-5, **keys)
    progress: dict[str, Any] = {"scheduler_steps": {"actor": done}}
    if planned is not None:
        progress["learning_rates"] = {"actor": 1e-5 * rate_factor(optim, planned)(done)}
    return list(jumps(progress, {"actor": (optim, now), "critic": (optim, now)}))


def test_schedules_by_hand() -> None:
    assert rates(6, lr_warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert rates(3) == [1, 1, 1]
    cosine = rates(5, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    assert cosine == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(5)])
    assert rates(5, lr_scheduler_type="linear", min_lr_ratio=0.2) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


def test_the_ratio_counts_if_the_steps_of_warmup_are_negative() -> None:
    assert rates(10, lr_warmup_steps_ratio=0.2)[:3] == pytest.approx([0.5, 1, 1])
    assert rates(10, lr_warmup_steps_ratio=0.5, lr_warmup_steps=0)[0] == 1


def test_a_longer_run_says_where_its_rate_goes_on() -> None:
    (line,) = said(10, 10, 20, lr_scheduler_type="linear", min_lr_ratio=0.1)
    assert "of the actor goes on at 5.26e-06, which is 0.53 of its peak, and stood at 1e-06" in line
    assert "its linear schedule now has 20 optimiser steps, with 10 done" in line


@pytest.mark.parametrize(
    ("done", "planned", "now", "keys"),
    [
        pytest.param(5, 10, 10, {"lr_scheduler_type": "linear"}, id="the same length"),
        pytest.param(10, 10, 20, {}, id="a constant rate"),
        pytest.param(0, 10, 20, {"lr_scheduler_type": "cosine"}, id="no step so far"),
        pytest.param(10, None, 20, {"lr_scheduler_type": "linear"}, id="a checkpoint of an older version"),
    ],
)
def test_a_rate_that_goes_on_needs_no_line(done: int, planned: int | None, now: int, keys: dict[str, Any]) -> None:
    assert said(done, planned, now, **keys) == []


def test_a_shorter_run_and_a_warmup_that_grows_jump_too() -> None:
    assert "at 0, which is 0.00 of its peak, and stood at 5.71e-06" in said(3, 8, 3, lr_scheduler_type="linear")[0]
    assert "which is 0.60 of its peak, and stood at 1e-05" in said(5, 5, 20, lr_warmup_steps_ratio=0.5)[0]
