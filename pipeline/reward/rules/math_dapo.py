r"""Reward of the DAPO and AIME prompts: 1.0 for the right answer, -1.0 for a wrong one or none.

Their prompts ask for a last line `Answer: ...`. The last such line of the whole response counts, and where there is
none, the last box; the answer is compared as in MATH (`math_equal.py`), so `Answer: $\frac12$` is right for 0.5.
"""

import re
from typing import Any

from pipeline.reward.rules.boxed import last_boxed
from pipeline.reward.rules.math_boxed import MAX_PRED, read_truth
from pipeline.reward.rules.math_equal import equal

_LINE = re.compile(r"(?s:.*)(?i:answer)[*_]{0,3}[ \t]{0,9}:[*_\s]{0,9}([^\n]{1,2000})")


def compute_score(solution_str: str, ground_truth: str | int | float) -> dict[str, Any]:
    """Score of a response.

    Args:
        solution_str: the decoded response, any text at all.
        ground_truth: the answer in LaTeX or a number.

    Returns:
        `score` (1.0 or -1.0), `acc` and `format` (0 or 1: the answer is right; there is a line `Answer:`), and `pred`,
        the answer as written, at most `MAX_PRED` characters of it, "" where there is none.

    Raises:
        ValueError: `ground_truth` is no text or number, or is empty or too long.
    """
    truth = read_truth(ground_truth, "math_dapo")
    line = answer_line(solution_str)
    answer = last_boxed(solution_str) if line is None else line
    correct = answer is not None and equal(truth, answer)
    return {
        "score": 1.0 if correct else -1.0,
        "acc": int(correct),
        "format": int(line is not None),
        "pred": (answer or "")[:MAX_PRED],
    }


def answer_line(text: str) -> str | None:
    """What the last `Answer:` of the text is followed by on its line, or None where there is none."""
    match = _LINE.match(text)  # the greedy `.*` tries the end of the text first
    if match is None:
        return None
    answer = match[1].strip().strip("*_").strip()
    return last_boxed(answer) if "\\boxed" in answer else answer.strip("$").strip()
