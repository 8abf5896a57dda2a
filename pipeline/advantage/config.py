"""Settings of the advantage stage and of the stream's order (`algorithm.*`)."""

from dataclasses import dataclass


@dataclass
class AlgorithmConfig:
    """How rewards become advantages, and how old a row may be."""

    adv_estimator: str = "grpo"
    """Registered name of the advantage estimator, or an import path `package.module:function`."""

    norm_adv_by_std_in_grpo: bool = True
    """Divide GRPO advantages by the group's standard deviation; false is Dr.GRPO."""

    max_staleness: int = 0
    """How many policy versions a row may be older than the one that trains on it; 0 is strictly on-policy."""
