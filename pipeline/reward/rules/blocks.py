"""Reward for pictures of blocks (`python -m jobs.prepare blocks`): 1 if the response is the answer, else 0."""

from typing import Any

LONGEST = 20
"""Maximum number of characters of an answer."""


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Score a response. Upper case and whitespace around the answer do not count.

    Raises:
        ValueError: the ground truth is not a text of at most `LONGEST` characters.
    """
    if not isinstance(ground_truth, str) or not 0 < len(ground_truth) <= LONGEST:
        raise ValueError(f"ground_truth is {ground_truth!r:.80}; it must be an answer of at most {LONGEST} characters")
    answer = solution_str.strip()
    answer = answer.lower() if len(answer) <= LONGEST else ""
    right = float(answer == ground_truth.lower())
    return {"score": right, "acc": right, "format": float(bool(answer)), "pred": answer}
