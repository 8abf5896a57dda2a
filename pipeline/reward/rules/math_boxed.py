r"""Reward for MATH: 1.0 if the last `\boxed{...}` of the response holds the right answer, else 0.0.

`boxed.py` finds the box, and `math_equal.py` compares its content with the ground truth, so `\boxed{0.5}` is right for
`\frac{1}{2}`. An empty box is always wrong. The rules for DAPO and Geometry3K use functions of this module.
"""

import re
from collections.abc import Callable
from typing import Any

from pipeline.reward.rules.boxed import last_boxed
from pipeline.reward.rules.budget import Function, within
from pipeline.reward.rules.math_equal import AlgebraError, equal, load_algebra

MAX_PRED = 300  # maximum number of characters in `pred`
MAX_TRUTH = 2000  # maximum number of characters in a ground truth
TOO_COSTLY = {"score": 0.0, "acc": 0, "format": 0, "pred": "", "undecided": 1}

_PHRASE = re.compile(r"(?s:.*)(?i:\banswers?(?: is| are|:))[ \t]{0,9}([^\n]{1,400})")
_END = re.compile(r"\.(?=\s|$)|\$(?=[.,;]?\s|$)")


def bounded(wrong: float) -> Callable[[Function], Function]:
    """Return a decorator for a rule that uses algebra: a response that takes 1.5 seconds of CPU time scores `wrong`."""
    return within(cpu_s=1.5, wrong=TOO_COSTLY | {"score": wrong}, prepare=load_algebra)


@bounded(0.0)
def compute_score(solution_str: str, ground_truth: str | int | float, phrase: bool = False) -> dict[str, Any]:
    r"""Score a response to a problem with a mathematical expression as its answer.

    Args:
        solution_str: the response, any text.
        ground_truth: the answer in LaTeX or as a number, with or without `\boxed{...}`.
        phrase: True: in a response without a box, the text after the last "answer is" or "answer:" is the answer.

    Raises:
        ValueError: `ground_truth` is neither text nor a number, or is empty or too long.
    """
    truth = read_truth(ground_truth, "math")
    box = last_boxed(solution_str)
    answer = after_phrase(solution_str) if box is None and phrase else box
    return graded(truth, answer, well_formed=box is not None)


def graded(truth: str, answer: str | None, well_formed: bool, wrong: float = 0.0) -> dict[str, Any]:
    """Compare an answer with the ground truth, and return the result of the rule.

    Args:
        truth: the right answer.
        answer: answer of the response; None if it has none.
        well_formed: True if the answer is in the requested form; becomes `format`.
        wrong: score of a wrong answer.

    Returns:
        score, acc, format, pred, and `undecided`: 1 if algebra failed on the answer, which then counts as wrong.
    """
    correct, undecided = False, False
    if answer is not None:
        try:
            correct = equal(truth, answer)
        except AlgebraError:
            undecided = True
    return {
        "score": 1.0 if correct else wrong,
        "acc": int(correct),
        "format": int(well_formed),
        "pred": (answer or "")[:MAX_PRED],
        "undecided": int(undecided),
    }


def after_phrase(text: str) -> str | None:
    """Return the text after the last "answer is" or "answer:", up to the end of the sentence; None without it."""
    match = _PHRASE.match(text)  # the greedy `.*` tries the end of the text first
    if match is None:
        return None
    answer = match[1].strip().strip("*").strip()
    end = _END.search(answer, 1)
    return (answer if end is None else answer[: end.start()]).strip().strip("$*").strip() or None


def read_truth(ground_truth: Any, kind: str) -> str:
    r"""Return the answer in a ground truth as text, without a `\boxed{...}` around it.

    Args:
        ground_truth: `reward_model.ground_truth` of the row.
        kind: name of the rule, for the error text.

    Raises:
        ValueError: `ground_truth` is neither text nor a number, or is empty or too long.
    """
    text = None
    if isinstance(ground_truth, str):
        text = ground_truth.strip()
        text = (last_boxed(text) or "") if "\\boxed" in text else text.strip("$").strip()
    elif isinstance(ground_truth, int | float) and not isinstance(ground_truth, bool) and ground_truth == ground_truth:
        text = str(ground_truth)
    if not text or len(text) > MAX_TRUTH:
        raise ValueError(
            f"reward_model.ground_truth of a {kind} row must be the answer, as text of at most {MAX_TRUTH} characters "
            f"or as a number, not {repr(ground_truth)[:100]}"
        )
    return text
