"""Reward for GSM8K: 1.0 for the right number, 0.0 for another number or none.

Two methods find the answer in the response; any amount of text may follow the answer:
- `strict`: the number after the last `####` that has a number on the same line, as the prompt requests.
- `flexible` (the default): the same, but in a response without such a `####` the last number counts.

Details:
1. Numbers are compared in a canonical form and not as floats: `42`, `42.0`, `$42`, `42.` and `042` are equal.
2. A number is ASCII digits with at most one decimal point, and commas only between groups of three digits; the first
   group does not begin with 0. LaTeX's `1{,}000` is a number too. Anything else that looks like a number (`1.2.3`,
   `0,005`, `3/4`, `2^5`, `f(5)`, `4½`, digits of other scripts) makes the answer wrong.
3. After the number, closing marks, a percent sign, a unit (also `cm^2`) and text are allowed. If the text continues the
   number, the answer is wrong (`42 million`, `42k`, `42 and a half`). On the line of the `####`, another digit, an
   operator or a number as a word also makes the answer wrong (`42 vs 43`, `42 or forty`).
4. Before the number, one sign and a currency sign are allowed: `#### - 42` is -42, and `#### --42` is wrong. In other
   text a minus is a sign unless a character stands right before it: the last number of `5-7` is 7, of `= -7` it is -7.
"""

import re
from decimal import Decimal
from typing import Any, Literal

from pipeline.reward.rules import quantity

METHODS = ("strict", "flexible")
MAX_PRED = 100  # maximum number of characters in `pred`

# A greedy `.*` tries the end of the response first. Each run of digits is read once from its first character on, so
# time is linear. A run holds digits of any script, so that the ASCII part of a refused run never counts as a number.
_DIGIT = r"\d\u00bc-\u00be\u2150-\u218b\u2460-\u249b"  # with fractions and the like of one character
_RUN = rf"[{_DIGIT}.,]*[{_DIGIT}]"
_BLANKS = r"[^\S\n]*+"
_SIGNED = (
    rf"([-+\u2212\u2013]*){_BLANKS}(?:\\?\$|[\u20ac\u00a3\u00a5\u20b9])?{_BLANKS}([-+\u2212\u2013]*){_BLANKS}({_RUN})"
)
_STRICT = re.compile(rf"(?s:.*)####{_BLANKS}{_SIGNED}")
_LAST = re.compile(rf"(?s:.*)(?<![{_DIGIT}.,])({_RUN})")
_JOINED = re.compile(
    r"(?:\d[ ]?/[ ]?|\^[{(]?|\d[ ]?\*\*[ ]?|\d[eE][-+]?|\d[A-Za-z_']{1,2}|\d\}\{|(?:\u221a|sqrt)[ ]?[({]?|(\d\s)"
    r"|\d:|\d[ ]?[\u00f7\u2044\u2215][ ]?|(?<![A-Za-z])(?:[a-z]_?|[a-zA-Z]\(|(?:log|ln|sin|cos|tan)[ ]?[ ({])"
    r"|\d,?\s(?i:or|vs\.?|versus)\s\$?|(?i:between)\s\$?[\d.,]{1,20}\sand\s\$?)\Z"
)
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,?\\!,?)(?=\d{3}(?!\d))")  # as LaTeX has them
_BEFORE = 40  # characters before a number that are looked at
_SIGN = re.compile(
    r"(?:(?<![\w)\]}%\u2212\u2013-])[-\u2212\u2013]|=\s?[-\u2212\u2013]\s?|\b(?i:minus|negative)\s)\\?\$?\Z"
)
_NUMBER = re.compile(r"([0-9]*|[1-9][0-9]{0,2}(?:,[0-9]{3})++)(?:\.([0-9]+))?")
_TRUTH = re.compile(rf"\s*{_SIGNED}\.?\s*")


def canonical(digits: str, negative: bool) -> str | None:
    """Return the canonical form of a number, without commas and needless zeros; None if `digits` is not a number.

    Args:
        digits: the number as text, without a sign.
        negative: True if it is negative.
    """
    match = _NUMBER.fullmatch(digits)
    if match is None:
        return None
    whole, fraction = match[1].replace(",", "").lstrip("0") or "0", (match[2] or "").rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if negative and number != "0" else number


def strict_answer(solution_str: str) -> tuple[str, bool] | None:
    """Return (digits, negative) of the number after the last `####` with a number on its line; None without it.

    If the text after the number continues it, that text is included in the digits, so `canonical` refuses them.
    """
    match = _STRICT.match(solution_str)
    if match is None:
        return None
    behind = solution_str[match.end() :].partition("\n")[0]
    signs, digits = match[1] + match[2], match[3]
    if len(signs) > 1:
        return signs + digits, False
    return digits + (behind if quantity.goes_on_in_line(quantity.without_exponents(behind)) else ""), signs not in (
        "",
        "+",
    )


def last_number(solution_str: str) -> tuple[str, bool] | None:
    """Return (digits, negative) of the last number in the response; None without a digit.

    If the number ends a fraction or a power, or the text after it continues it, that text is included in the digits, so
    `canonical` refuses them.
    """
    text = quantity.without_exponents(solution_str)
    match = _LAST.match(text)
    if match is None:
        return None
    start, digits = match.start(1), match[1]
    before, behind = text[max(0, start - _BEFORE) : start], text[match.end() :][: quantity.LONGEST]
    joined = _JOINED.search(before)
    if joined is not None and (joined[1] is None or len(digits) == 3):
        return joined[0] + digits, False
    # Dots and commas before the number belong to the text ("is...42"), but a single dot is a decimal point.
    digits = digits.lstrip(",")
    digits = digits.lstrip(".") if digits.startswith("..") else digits
    return digits + (behind if quantity.goes_on(behind) else ""), _SIGN.search(before) is not None


def compute_score(
    solution_str: str, ground_truth: str | int | float, method: Literal["strict", "flexible"] = "flexible"
) -> dict[str, Any]:
    """Score a response to a GSM8K problem.

    Args:
        solution_str: the response, any text.
        ground_truth: the number, or text that holds only the number, such as `"1,000"`.
        method: method to find the answer in the response.

    Raises:
        ValueError: `ground_truth` is not a number, or the method is unknown.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, but must be one of {', '.join(METHODS)}")
    truth = read_truth(ground_truth)
    solution_str = _THOUSANDS.sub(",", solution_str)
    strict = strict_answer(solution_str)
    answer = last_number(solution_str) if strict is None and method == "flexible" else strict
    if answer is None:
        return {"score": 0.0, "acc": 0, "format": 0, "pred": ""}
    number = canonical(*answer)
    pred = answer[0] if number is None else number
    correct = number == truth
    return {"score": float(correct), "acc": int(correct), "format": int(strict is not None), "pred": pred[:MAX_PRED]}


def read_truth(ground_truth: Any) -> str:
    """Return the canonical form of a ground truth.

    Raises:
        ValueError: `ground_truth` is not a number or the text of a number.
    """
    number = None
    if isinstance(ground_truth, str):
        match = _TRUTH.fullmatch(ground_truth)
        if match is not None and len(match[1] + match[2]) < 2:
            number = canonical(match[3], match[1] + match[2] not in ("", "+"))
    elif isinstance(ground_truth, int | float) and not isinstance(ground_truth, bool):
        number = canonical(f"{Decimal(str(ground_truth)).copy_abs():f}", ground_truth < 0)
    if number is None:
        shown = repr(ground_truth)[:MAX_PRED]
        raise ValueError(f"reward_model.ground_truth of a gsm8k row must be a number or the text of one, not {shown}")
    return number
