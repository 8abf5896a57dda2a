"""Reward rules by `data_source`: a plain dict, so the whole list is read at a glance.

A rule is `compute_score(solution_str, ground_truth)`, a pure function of the response text and the row's ground truth.
It returns a number, or a dict with the key `score` and further parts, and raises `ValueError` for ground truth it
cannot use: that is an error of the data, never a 0. A new rule is one module here and one line below.
"""

from collections.abc import Callable
from typing import Any

from pipeline.reward.rules import countdown, gsm8k

Rule = Callable[[str, Any], float | dict[str, Any]]

RULES: dict[str, Rule] = {
    "countdown": countdown.compute_score,
    "gsm8k": gsm8k.compute_score,
    "openai/gsm8k": gsm8k.compute_score,  # the name in verl's files
}


def rule_of(data_source: str) -> Rule:
    """The rule that scores rows of `data_source`.

    Raises:
        ValueError: no rule has that name; the sentence lists those there are.
    """
    if data_source not in RULES:
        raise ValueError(
            f"data_source {data_source!r} has no reward rule (known: {', '.join(sorted(RULES))}); name one of these in "
            "the data, or set reward.custom_reward_function.path to a Python file with a function of your own"
        )
    return RULES[data_source]
