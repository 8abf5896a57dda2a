"""A reward that random models can earn: short responses."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Score a response by minus its number of characters."""
    return -float(len(solution_str))
