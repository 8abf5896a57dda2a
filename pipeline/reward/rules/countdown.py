"""Reward of a Countdown answer: reach the target with each given number used exactly once.

Scores as in TinyZero: 1.0 for a correct answer, 0.1 for an answer that is there and wrong, 0.0 for none. Chosen:

1. The answer is the last `<answer>` that is closed; the text up to the first `</answer>` after it counts.
2. It is read by a tokenizer and a recursive-descent parser over exact rationals, never by Python: `1 / 3 * 3` is 1,
   and `9**9**9` is a syntax error instead of a long computation. Length, depth and digits are bounded first, and
   the numbers must be the given ones before anything is computed, so a hostile answer costs no more than a wrong one.
3. The language is what the prompt asks for: ASCII digits without leading zeros, `+ - * / ( )` and blanks. A minus
   sign may stand before a number or a bracket (`-(3 - 7) * 5`). Refused, as in TinyZero, whose scores thereby stay
   comparable: `×` and `÷`, `**`, `//`, decimal points, digits of other scripts, and an equation (`(1 + 2) * 3 = 9`).
"""

import re
from fractions import Fraction
from typing import Any

OPEN, CLOSE = "<answer>", "</answer>"
MAX_LENGTH = 1000  # characters of an answer, blanks included
MAX_DEPTH = 50  # brackets and signs inside each other
MAX_DIGITS = 18  # of one number: any that fits int64

_TOKEN = re.compile(r"([0-9]+)|([-+*/()])|[ \t\r\n]+")


class AnswerError(ValueError):
    """The answer is not an expression of the language above."""


def extract_answer(solution_str: str) -> str | None:
    """Text of the last closed `<answer>` block, or None where there is none. Linear in the response's length."""
    start = solution_str.rfind(OPEN, 0, max(solution_str.rfind(CLOSE), 0))
    if start < 0:
        return None
    start += len(OPEN)
    return solution_str[start : solution_str.find(CLOSE, start)]


def tokenize(answer: str) -> list[int | str]:
    """Numbers as ints and `+ - * / ( )` as strings, blanks left out.

    Raises:
        AnswerError: the answer is too long, a number has too many digits or a leading zero, or a character is foreign.
    """
    if len(answer) > MAX_LENGTH:
        raise AnswerError(f"the answer has {len(answer)} characters, more than {MAX_LENGTH}")
    tokens: list[int | str] = []
    position = 0
    while position < len(answer):
        match = _TOKEN.match(answer, position)
        if match is None:
            raise AnswerError(f"{answer[position]!r} at character {position} is not allowed")
        digits, symbol = match.groups()
        if digits:
            if len(digits) > MAX_DIGITS or (digits[0] == "0" and len(digits) > 1):
                raise AnswerError(f"the number at character {position} has a leading zero or over {MAX_DIGITS} digits")
            tokens.append(int(digits))
        elif symbol:
            tokens.append(symbol)
        position = match.end()
    return tokens


def evaluate(tokens: list[int | str]) -> Fraction:
    """Exact value of the expression.

    Grammar: `sum = product {("+" | "-") product}`, `product = factor {("*" | "/") factor}`,
    `factor = number | "(" sum ")" | "-" factor`.

    Raises:
        AnswerError: the tokens are no such expression, or nest deeper than `MAX_DEPTH`.
        ZeroDivisionError: it divides by zero.
    """
    value, end = _sum(tokens, 0, 0)
    if end < len(tokens):
        raise AnswerError(f"{tokens[end]!r} follows a complete expression")
    return value


def _at(tokens: list[int | str], position: int) -> int | str:
    return tokens[position] if position < len(tokens) else ""


def _sum(tokens: list[int | str], position: int, depth: int) -> tuple[Fraction, int]:
    value, position = _product(tokens, position, depth)
    while (sign := _at(tokens, position)) in ("+", "-"):
        right, position = _product(tokens, position + 1, depth)
        value = value + right if sign == "+" else value - right
    return value, position


def _product(tokens: list[int | str], position: int, depth: int) -> tuple[Fraction, int]:
    value, position = _factor(tokens, position, depth)
    while (sign := _at(tokens, position)) in ("*", "/"):
        right, position = _factor(tokens, position + 1, depth)
        value = value * right if sign == "*" else value / right
    return value, position


def _factor(tokens: list[int | str], position: int, depth: int) -> tuple[Fraction, int]:
    if depth > MAX_DEPTH:
        raise AnswerError(f"the answer nests deeper than {MAX_DEPTH}")
    token = _at(tokens, position)
    if isinstance(token, int):
        return Fraction(token), position + 1
    if token == "-":
        value, position = _factor(tokens, position + 1, depth + 1)
        return -value, position
    if token != "(":
        raise AnswerError(f"a number or a bracket is expected where {token or 'the end'!r} stands")
    value, position = _sum(tokens, position + 1, depth + 1)
    if _at(tokens, position) != ")":
        raise AnswerError("a bracket is not closed")
    return value, position + 1


def is_correct(answer: str, numbers: list[int], target: int) -> bool:
    """Whether `answer` uses each of `numbers` exactly once and equals `target`."""
    try:
        tokens = tokenize(answer)
        if sorted(token for token in tokens if isinstance(token, int)) != sorted(numbers):
            return False
        return evaluate(tokens) == target
    except (AnswerError, ZeroDivisionError):
        return False


def compute_score(solution_str: str, ground_truth: dict[str, Any]) -> dict[str, Any]:
    """Score of a response to a Countdown prompt.

    Args:
        solution_str: the decoded response, any text at all.
        ground_truth: `{"target": int, "numbers": [int, ...]}`.

    Returns:
        `score` (1.0, 0.1 or 0.0), `acc` and `format` (0 or 1: the answer is right; there is one), and `pred`, the
        answer without blanks, at most `MAX_LENGTH` characters of it, "" where there is none (for majority votes).

    Raises:
        ValueError: `ground_truth` is not of that form.
    """
    numbers, target = _read(ground_truth)
    answer = extract_answer(solution_str)
    if answer is None:
        return {"score": 0.0, "acc": 0, "format": 0, "pred": ""}
    correct = is_correct(answer, numbers, target)
    pred = "".join(answer[:MAX_LENGTH].split())
    return {"score": 1.0 if correct else 0.1, "acc": int(correct), "format": 1, "pred": pred}


def _read(ground_truth: Any) -> tuple[list[int], int]:
    if not isinstance(ground_truth, dict):
        kind = type(ground_truth).__name__
        raise ValueError(f"reward_model.ground_truth of a countdown row must hold target and numbers, not be a {kind}")
    numbers, target = ground_truth.get("numbers"), ground_truth.get("target")
    if not isinstance(target, int) or isinstance(target, bool):
        raise ValueError(f"reward_model.ground_truth.target of a countdown row must be a whole number, not {target!r}")
    if not isinstance(numbers, list) or not numbers or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(
            "reward_model.ground_truth.numbers of a countdown row must be a list of whole numbers from 0, at least "
            f"one, not {numbers!r}"
        )
    return numbers, target
