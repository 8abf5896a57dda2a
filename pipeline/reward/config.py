"""Settings of the reward stage (`reward.*`)."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class CustomRewardConfig:
    """A reward function of your own (`reward.custom_reward_function.*`)."""

    path: str | None = None
    """Python file that holds the function; null uses the rule of the row's `data_source`."""

    name: str = "compute_score"
    """Name of the function: `f(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)`, which returns
    a number or a dict with the key `score`."""

    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments for the function."""

    timeout_s: float = 300.0
    """Seconds an `async def` function may take for one row; the row then counts as failed."""


@dataclass
class RewardConfig:
    """The stage that scores responses."""

    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    """A reward function of your own, used for every row."""

    num_cpus: float = 1
    """Ray CPUs of one reward task; Ray Data runs as many tasks as fit."""

    max_error_rate: float = 0.1
    """Largest share of an iteration's rows whose reward may fail; the run stops beyond it."""
