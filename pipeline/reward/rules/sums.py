"""Reward for sums: 1.0 if the last number of the response is right, else 0.0, as in GSM8K without `####`."""

from typing import Any

from pipeline.reward.rules import gsm8k


def compute_score(solution_str: str, ground_truth: str | int) -> dict[str, Any]:
    """Score a response to a sum. `format` is 1 if the response is only a number, as the prompt requests.

    Raises:
        ValueError: `ground_truth` is not a number.
    """
    scored = gsm8k.compute_score(solution_str, ground_truth)
    return scored | {"format": int(scored["pred"] != "" and solution_str.strip() == scored["pred"])}
