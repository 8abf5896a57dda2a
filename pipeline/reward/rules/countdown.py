"""Reward for Countdown: the answer must be an expression that equals the target and uses each number exactly once.

Scores as in TinyZero: 1.0 for a right answer, 0.1 for a wrong answer, 0.0 without an answer.

1. The answer is the text in the last closed `<answer>...</answer>`.
2. It is never run as Python: a tokenizer and a precedence-climbing parser compute it with exact fractions. Length,
   nesting and digits are limited first, and the numbers must be the given ones before anything is computed.
3. Allowed are ASCII digits without leading zeros, `+ - * / ( )` and whitespace; a minus sign may stand before a number
   or a bracket. Other operators, decimal points, digits of other scripts and equations are wrong, as in TinyZero.
"""

import operator
import re
from fractions import Fraction
from typing import Any

OPEN, CLOSE = "<answer>", "</answer>"
MAX_LENGTH = 1000  # maximum number of characters in an answer, with whitespace
MAX_DEPTH = 50  # maximum nesting of brackets and signs
MAX_DIGITS = 18  # maximum number of digits in a number, so that it fits int64

_TOKEN = re.compile(r"([0-9]+)|([-+*/()])|[ \t\r\n]+")
_COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_BINDING = {"+": 1, "-": 1, "*": 2, "/": 2}


class AnswerError(ValueError):
    """Error for an answer that is not an expression in the allowed form."""


def extract_answer(solution_str: str, opening: str = OPEN, closing: str = CLOSE) -> str | None:
    """Return the text in the last closed `<answer>...</answer>`, or None without it. Takes linear time."""
    start = solution_str.rfind(opening, 0, max(solution_str.rfind(closing), 0))
    if start < 0:
        return None
    start += len(opening)
    return solution_str[start : solution_str.find(closing, start)]


def tokenize(answer: str) -> list[int | str]:
    """Split an answer into tokens, without whitespace: numbers as ints, and `+ - * / ( )` as strings.

    Raises:
        AnswerError: the answer is too long, a number has too many digits or a leading zero, or a character is not
            allowed.
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
    """Compute the exact value of the expression `tokens`.

    Raises:
        AnswerError: the tokens are not an expression, or nest deeper than `MAX_DEPTH`.
        ZeroDivisionError: the expression divides by zero.
    """
    left = tokens[::-1]
    value = _expression(left, 0, 0)
    if left:
        raise AnswerError(f"{left[-1]!r} follows a complete expression")
    return value


def _expression(left: list[int | str], depth: int, binding: int) -> Fraction:
    """Compute an expression up to the first operator that does not bind more strongly than `binding`.

    Args:
        left: remaining tokens in reverse order; used tokens are removed.
        depth: current nesting.
        binding: strength of the operator before the expression (`_BINDING`); 0 at the beginning.
    """
    value = _operand(left, depth)
    while left and (strength := _BINDING.get(str(left[-1]), 0)) > binding:
        compute = _COMPUTE[str(left.pop())]
        value = compute(value, _expression(left, depth, strength))
    return value


def _operand(left: list[int | str], depth: int) -> Fraction:
    """Compute a number, an expression in brackets, or the negative of one of them."""
    if depth > MAX_DEPTH:
        raise AnswerError(f"the answer nests deeper than {MAX_DEPTH}")
    token = left.pop() if left else "the end"
    if isinstance(token, int):
        return Fraction(token)
    if token == "-":
        return -_operand(left, depth + 1)
    if token != "(":
        raise AnswerError(f"a number or a bracket is expected, not {token!r}")
    value = _expression(left, depth + 1, 0)
    if not left or left.pop() != ")":
        raise AnswerError("a bracket is not closed")
    return value


def is_correct(answer: str, numbers: list[int], target: int) -> bool:
    """Return True if `answer` uses each of `numbers` exactly once and equals `target`."""
    try:
        tokens = tokenize(answer)
        if sorted(token for token in tokens if isinstance(token, int)) != sorted(numbers):
            return False
        return evaluate(tokens) == target
    except (AnswerError, ZeroDivisionError):
        return False


def compute_score(solution_str: str, ground_truth: dict[str, Any]) -> dict[str, Any]:
    """Score a response to a Countdown prompt.

    Args:
        solution_str: the response, any text.
        ground_truth: `{"target": int, "numbers": [int, ...]}`.

    Raises:
        ValueError: `ground_truth` does not have this form.
    """
    numbers, target = _read(ground_truth)
    answer = extract_answer(solution_str)
    if answer is None:
        return {"score": 0.0, "acc": 0, "format": 0, "pred": ""}
    correct = is_correct(answer, numbers, target)
    pred = "".join(answer[:MAX_LENGTH].split())
    return {"score": 1.0 if correct else 0.1, "acc": int(correct), "format": 1, "pred": pred}


def _read(ground_truth: Any) -> tuple[list[int], int]:
    truth = ground_truth if isinstance(ground_truth, dict) else {}
    numbers, target = truth.get("numbers"), truth.get("target")
    whole = isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)
    if numbers and whole and type(target) is int:
        return numbers, target
    raise ValueError(
        "reward_model.ground_truth of a countdown row must be a mapping with target, a whole number, and numbers, a "
        f"list of at least one whole number from 0, not {repr(ground_truth)[:100]}"
    )
