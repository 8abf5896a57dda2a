r"""Reward of the DAPO and AIME prompts: 1.0 for the right answer, -1.0 for a wrong one or none.

These prompts request a last line `Answer: ...`. The last such line of the response counts; a response without one is
judged by its last box. Answers are compared as in MATH, so `Answer: $\frac12$` is right for 0.5.
"""

import re
from typing import Any

from pipeline.reward.rules.boxed import last_boxed, unboxed
from pipeline.reward.rules.math_boxed import bounded, graded, read_truth

WRONG = -1.0

_LINE = re.compile(r"(?s:.*)(?i:answer)[*_]{0,3}[ \t]{0,9}:[*_\s]{0,9}([^\n]{1,2000})")


@bounded(WRONG)
def compute_score(solution_str: str, ground_truth: str | int | float) -> dict[str, Any]:
    """Score as `math_boxed.compute_score` does; `format` is 1 if a line `Answer:` exists."""
    truth = read_truth(ground_truth, "math_dapo")
    line = answer_line(solution_str)
    answer = last_boxed(solution_str) if line is None else line
    return graded(truth, answer, well_formed=line is not None, wrong=WRONG)


def answer_line(text: str) -> str | None:
    """Return the rest of the line after the last `Answer:` of the text, its box opened; None without such a line."""
    match = _LINE.match(text)  # the greedy `.*` tries the end of the text first
    if match is None:
        return None
    answer = match[1].strip().strip("*_").strip()
    return unboxed(answer).strip("$").strip()
