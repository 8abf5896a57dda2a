r"""Reward of a MATH answer: 1.0 if the last box of the response holds the right answer, else 0.0.

`boxed.py` finds the box, and `math_equal.py` compares it with the truth, so that `\boxed{0.5}` is right for
`\frac{1}{2}`. An empty box is wrong for every truth. The rules for DAPO and Geometry3K share the functions below.
"""

import re
from collections.abc import Callable
from typing import Any

from pipeline.reward.rules.boxed import last_boxed
from pipeline.reward.rules.budget import Function, within
from pipeline.reward.rules.math_equal import AlgebraError, equal, load_algebra

MAX_PRED = 300  # characters of `pred`
MAX_TRUTH = 2000  # characters of a ground truth
TOO_COSTLY = {"score": 0.0, "acc": 0, "format": 0, "pred": "", "undecided": 1}

_PHRASE = re.compile(r"(?s:.*)(?i:\banswers?(?: is| are|:))[ \t]{0,9}([^\n]{1,400})")
_END = re.compile(r"\.(?=\s|$)|\$(?=[.,;]?\s|$)")


def bounded(wrong: float) -> Callable[[Function], Function]:
    """Make a decorator for a rule with algebra: a response on which it spends 1.5 CPU seconds scores `wrong`."""
    return within(cpu_s=1.5, wrong=TOO_COSTLY | {"score": wrong}, prepare=load_algebra)


@bounded(0.0)
def compute_score(solution_str: str, ground_truth: str | int | float, phrase: bool = False) -> dict[str, Any]:
    r"""Score a response, any text, to a problem whose answer is an expression.

    Args:
        ground_truth: the answer in LaTeX or a number, with or without `\boxed{...}`.
        phrase: without a box, take the text after the last "answer is" or "answer:".

    Raises:
        ValueError: as `read_truth`.
    """
    truth = read_truth(ground_truth, "math")
    box = last_boxed(solution_str)
    answer = after_phrase(solution_str) if box is None and phrase else box
    return graded(truth, answer, well_formed=box is not None)


def graded(truth: str, answer: str | None, well_formed: bool, wrong: float = 0.0) -> dict[str, Any]:
    """Return the parts of the reward of one answer; `answer` is None if the response has none.

    Args:
        well_formed: whether the answer is in the requested place: `format`.
        wrong: score of a wrong answer.

    Returns:
        The parts of every rule, and `undecided`: 1 if algebra failed on the answer, which counts as wrong.
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
    """Return the text after the last "answer is" or "answer:" up to the end of its sentence, or None without one."""
    match = _PHRASE.match(text)  # the greedy `.*` tries the end of the text first
    if match is None:
        return None
    answer = match[1].strip().strip("*").strip()
    end = _END.search(answer, 1)
    return (answer if end is None else answer[: end.start()]).strip().strip("$*").strip() or None


def read_truth(ground_truth: Any, kind: str) -> str:
    r"""Read the answer of a ground truth, without a `\boxed{...}` around it.

    Raises:
        ValueError: it is not text or a number, or is empty or too long.
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
