"""A reward function that is found by its import path."""

from typing import Any


def compute_score(solution_str: str, **row: Any) -> float:
    return len(solution_str)
