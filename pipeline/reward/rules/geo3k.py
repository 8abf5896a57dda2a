r"""Reward for Geometry3K: 0.9 for the right answer in `\boxed{...}`, plus 0.1 for thinking before it."""

from typing import Any

from pipeline.reward.rules import math_boxed


@math_boxed.bounded(0.0)
def compute_score(solution_str: str, ground_truth: str | int | float) -> dict[str, Any]:
    """Score a response like `math_boxed.compute_score`: 0.9 if the answer is right, plus 0.1 if `format` is 1.

    `format` is 1 if the response begins with `<think>` and has a box after `</think>`.
    """
    result = math_boxed.compute_score(solution_str, ground_truth)
    thought = solution_str.find("</think>")
    shaped = solution_str.startswith("<think>") and 0 <= thought < solution_str.rfind("\\boxed{")
    shaped = shaped and bool(result["format"])
    return result | {"score": 0.9 * result["acc"] + 0.1 * shaped, "format": int(shaped)}
