r"""Reward of a MATH answer: 1.0 where the last box of the response holds the right answer, else 0.0.

The box is found by `boxed.py`, and `math_equal.py` compares it with the truth through the math-verify library, so that
`\boxed{0.5}` is right for `\frac{1}{2}`. An empty box is wrong, whatever the truth.
"""

import re
from typing import Any

from pipeline.reward.rules.boxed import last_boxed
from pipeline.reward.rules.math_equal import equal

MAX_PRED = 300  # characters of `pred`
MAX_TRUTH = 2000  # characters of a ground truth

_PHRASE = re.compile(r"(?s:.*)(?i:\banswers?(?: is| are|:))[ \t]{0,9}([^\n]{1,400})")
_END = re.compile(r"\.(?=\s|$)|\$(?=[.,;]?\s|$)")


def compute_score(solution_str: str, ground_truth: str | int | float, phrase: bool = False) -> dict[str, Any]:
    r"""Score of a response to a problem whose answer is an expression.

    Args:
        solution_str: the decoded response, any text at all.
        ground_truth: the answer in LaTeX or a number, alone or in a `\boxed{...}`.
        phrase: take what follows the last "answer is" or "answer:" where there is no box.

    Returns:
        `score` (1.0 or 0.0), `acc` and `format` (0 or 1: the answer is right; there is a box), and `pred`, the answer
        as written, at most `MAX_PRED` characters of it, "" where there is none.

    Raises:
        ValueError: `ground_truth` is no text or number, or is empty or too long.
    """
    truth = read_truth(ground_truth, "math")
    box = last_boxed(solution_str)
    answer = after_phrase(solution_str) if box is None and phrase else box
    correct = answer is not None and equal(truth, answer)
    return {
        "score": float(correct),
        "acc": int(correct),
        "format": int(box is not None),
        "pred": (answer or "")[:MAX_PRED],
    }


def after_phrase(text: str) -> str | None:
    """What follows the last "answer is" or "answer:" up to the end of its sentence, or None where there is neither."""
    found = _PHRASE.match(text)  # the greedy `.*` tries the end of the text first
    if found is None:
        return None
    answer = found[1].strip().strip("*").strip()
    end = _END.search(answer, 1)
    return (answer if end is None else answer[: end.start()]).strip().strip("$*").strip() or None


def read_truth(ground_truth: Any, kind: str) -> str:
    r"""The answer of a ground truth, without a `\boxed{...}` around it.

    Raises:
        ValueError: it is no text or number, or is empty or too long.
    """
    text = None
    if isinstance(ground_truth, str):
        text = ground_truth.strip()
        text = (last_boxed(text) or "") if "\\boxed" in text else text.strip("$").strip()
    elif isinstance(ground_truth, int | float) and not isinstance(ground_truth, bool) and ground_truth == ground_truth:
        text = str(ground_truth)
    if not text or len(text) > MAX_TRUTH:
        shown = repr(ground_truth)[:100]
        raise ValueError(
            f"reward_model.ground_truth of a {kind} row must be the answer, as text of at most {MAX_TRUTH} characters "
            f"or as a number, not {shown}"
        )
    return text
