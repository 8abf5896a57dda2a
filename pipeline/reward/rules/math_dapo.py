r"""Reward for DAPO and AIME prompts: 1.0 for the right answer, -1.0 for a wrong answer or none.

These prompts request a last line `Answer: ...`. The last such line of the response counts; in a response without such a
line, the last `\boxed{...}` counts. Answers are compared as in MATH, so `Answer: $\frac12$` is right for 0.5.
"""

import re
from typing import Any

from pipeline.reward.rules.boxed import last_boxed, unboxed
from pipeline.reward.rules.math_boxed import bounded, graded, read_truth

WRONG = -1.0

_LINE = re.compile(r"(?s:.*)(?i:answer)[*_]{0,3}[ \t]{0,9}:[*_\s]{0,9}([^\n]{1,2000})")


@bounded(WRONG)
def compute_score(solution_str: str, ground_truth: str | int | float) -> dict[str, Any]:
    """Score a response like `math_boxed.compute_score`, but with -1.0 for a wrong answer or none.

    `format` is 1 if the response has a line `Answer: ...`.
    """
    truth = read_truth(ground_truth, "math_dapo")
    line = answer_line(solution_str)
    answer = last_boxed(solution_str) if line is None else line
    return graded(truth, answer, well_formed=line is not None, wrong=WRONG)


def answer_line(text: str) -> str | None:
    """Return the text after the last `Answer:` on its line, without a box around it; None without such a line."""
    match = _LINE.match(text)  # the greedy `.*` tries the end of the text first
    if match is None:
        return None
    answer = match[1].strip().strip("*_").strip()
    return unboxed(answer).strip("$").strip()
