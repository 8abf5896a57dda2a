"""Reward of a GSM8K answer: 1.0 for the right number, 0.0 for any other or none.

Two methods find the answer in the response, however much text follows it:
- `strict`: the last `####` that is followed by a number on its line, as the prompt asks.
- `flexible` (the default): the same; a response without such a `####` is judged by its last number.

Choices:
1. Numbers are compared in a canonical form and not as floats: `42`, `42.0`, `$42`, `42.` and `042` are one number.
2. A number is ASCII digits with at most one decimal point, and commas only between groups of three. Anything else that
   looks like a number (`1.2.3`, `3/4`, `2^5`, `40 or 42`, digits of other scripts) is a wrong answer as a whole.
3. A minus is a sign unless something stands right before it: the last number of `5-7` is 7, that of `= -7` is -7.
"""

import re
from decimal import Decimal
from typing import Any, Literal

METHODS = ("strict", "flexible")
MAX_PRED = 100  # characters of `pred`

# A greedy `.*` tries the end of the response first. Each run of digits is read once from its first character on, so
# time is linear. A run holds digits of any script, so that the ASCII part of a refused run never counts as a number.
_CONTINUED = (
    r"(?:[ \t]{0,3}(?:\*\*|[-+*/^=:,;xX\u2212\u00d7\u00f7]|or\b|and\b|to\b)[ \t({$]{0,3}-?[ \t$]?|[eE][-+]?|[ \t]{1,3})"
)
_STRICT = re.compile(rf"(?s:.*)####[ \t]*+([-+\u2212$\\]{{0,3}})([\d.,]*\d(?:{_CONTINUED}[\d.,]*\d)?)")
_LAST = re.compile(r"(?s:.*)(?<![\d.,])([\d.,]*\d)")
_JOINED = re.compile(r"(?:\d[ ]?/[ ]?|\^[{(]?|\d[ ]?\*\*[ ]?|\d[eE][-+]?|\d\}\{)\Z")
_SIGN = re.compile(r"(?<![\w)\]}%-])[-\u2212]\\?\$?\Z")
_NUMBER = re.compile(r"([0-9]*|[0-9]{1,3}(?:,[0-9]{3})++)(?:\.([0-9]+))?")
_TRUTH = re.compile(r"\s*([-+\u2212$]{0,2})([\d.,]*\d)\.?\s*")


def canonical(digits: str, negative: bool) -> str | None:
    """The one way to write a number: no commas, no needless zeros; None where `digits` is no number."""
    # Dots and commas before the number belong to the text ("is...42"), but a single dot is a decimal point.
    digits = digits.lstrip(",")
    match = _NUMBER.fullmatch(digits.lstrip(".") if digits.startswith("..") else digits)
    if match is None:
        return None
    whole, fraction = match[1].replace(",", "").lstrip("0") or "0", (match[2] or "").rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if negative and number != "0" else number


def strict_answer(solution_str: str) -> tuple[str, bool] | None:
    """Digits behind the last `####` that has any, and whether a minus stands before them; None where there is none.

    A formula is returned up to its second number, so that `canonical` refuses it.
    """
    match = _STRICT.match(solution_str)
    return None if match is None else (match[2], _minus(match[1]))


def last_number(solution_str: str) -> tuple[str, bool] | None:
    """Digits of the last number of the response, and whether it is negative; None where there is no digit.

    A number that ends a fraction or a power is returned with what joins it, so that `canonical` refuses it.
    """
    match = _LAST.match(solution_str)
    if match is None:
        return None
    start = match.start(1)
    before = solution_str[max(0, start - 6) : start]
    joined = _JOINED.search(before)
    return (joined[0] if joined else "") + match[1], _SIGN.search(before) is not None


def compute_score(
    solution_str: str, ground_truth: str | int | float, method: Literal["strict", "flexible"] = "flexible"
) -> dict[str, Any]:
    """Score of a response, any text, to a GSM8K problem.

    Args:
        ground_truth: the number, or text that holds it alone, such as `"1,000"`.

    Raises:
        ValueError: `ground_truth` is no number, or there is no such method.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, but must be one of {', '.join(METHODS)}")
    truth = _read(ground_truth)
    strict = strict_answer(solution_str)
    answer = last_number(solution_str) if strict is None and method == "flexible" else strict
    if answer is None:
        return {"score": 0.0, "acc": 0, "format": 0, "pred": ""}
    number = canonical(*answer)
    pred = answer[0] if number is None else number
    correct = number == truth
    return {"score": float(correct), "acc": int(correct), "format": int(strict is not None), "pred": pred[:MAX_PRED]}


def _minus(text: str) -> bool:
    return "-" in text or "\u2212" in text


def _read(ground_truth: Any) -> str:
    number = None
    if isinstance(ground_truth, str):
        match = _TRUTH.fullmatch(ground_truth)
        number = None if match is None else canonical(match[2], _minus(match[1]))
    elif isinstance(ground_truth, int | float) and not isinstance(ground_truth, bool):
        number = canonical(f"{Decimal(str(ground_truth)).copy_abs():f}", ground_truth < 0)
    if number is None:
        shown = repr(ground_truth)[:MAX_PRED]
        raise ValueError(f"reward_model.ground_truth of a gsm8k row must be a number or the text of one, not {shown}")
    return number
