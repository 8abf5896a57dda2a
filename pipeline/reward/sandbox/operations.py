"""Operations that assertions may use on results of a program, with limits on the size of values.

The values are exact built-in types (`inside/values.py`), so Python's own comparison decides without running code of the
program: 1 equals True and 1.0, -0.0 equals 0, and nan equals nothing.
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from pipeline.reward.sandbox.inside.values import distinct

MAX_BITS = 1 << 16  # of a whole number that is calculated with
MAX_ITEMS = 1 << 20  # of a sequence that is repeated
MAX_SHORT = 64  # characters of a text in it

ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, RecursionError)
"""Exceptions that an operation may raise for wrong values."""

COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


def number(value: Any) -> Any:
    """Return `value`. Raises one of `ERRORS` if it is not a number, or has more than `MAX_BITS` bits."""
    if not isinstance(value, int | float | complex):
        raise TypeError(f"a number is needed, not a {type(value).__name__}")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError(f"a number of more than {MAX_BITS} bits")
    return value


def _add(a: Any, b: Any) -> Any:
    if type(a) is type(b) and isinstance(a, str | bytes | list | tuple):
        return a + b
    return number(a) + number(b)


def _subtract(a: Any, b: Any) -> Any:
    if isinstance(a, set | frozenset) and isinstance(b, set | frozenset):
        return a - b
    return number(a) - number(b)


def _short(item: Any) -> bool:
    if isinstance(item, str | bytes):
        return len(item) <= MAX_SHORT
    return item is None or isinstance(item, float | complex) or isinstance(item, int) and item.bit_length() <= 64


def _multiply(a: Any, b: Any) -> Any:
    for sequence, times in ((a, b), (b, a)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
            if len(sequence) * max(times, 0) > MAX_ITEMS or not all(map(_short, sequence)):
                raise OverflowError(f"a sequence of more than {MAX_ITEMS} items, or of long ones, by repetition")
            return sequence * times
    return number(a) * number(b)


def _power(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int) and number(a).bit_length() * abs(number(b)) > MAX_BITS:
        raise OverflowError(f"a number of more than {MAX_BITS} bits")
    return number(a) ** number(b)


BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: _add,
    ast.Sub: _subtract,
    ast.Mult: _multiply,
    ast.Div: lambda a, b: number(a) / number(b),
    ast.FloorDiv: lambda a, b: number(a) // number(b),
    # For a text, this would be a format, of any width.
    ast.Mod: lambda a, b: number(a) % number(b),
    ast.Pow: _power,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: lambda a: -number(a),
    ast.UAdd: lambda a: +number(a),
    ast.Not: operator.not_,
}


def _round(value: Any, ndigits: Any = None) -> Any:
    if ndigits is not None and not -MAX_BITS < number(ndigits) < MAX_BITS:
        raise OverflowError("so many digits are not rounded to")
    return round(number(value), ndigits)


def _sum(items: Any, start: Any = 0) -> Any:
    total = number(start)
    for item in items:
        total = number(total) + number(item)
    return total


def _dict(items: Any = ()) -> dict[Any, Any]:
    pairs = [(key, value) for key, value in (items.items() if isinstance(items, dict) else items)]
    distinct(key for key, _ in pairs)
    return dict(pairs)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "len": (len, ()),
    "abs": (lambda value: abs(number(value)), ()),
    "round": (_round, ("ndigits",)),
    "sum": (_sum, ("start",)),
    "min": (min, ("default",)),
    "max": (max, ("default",)),
    "sorted": (sorted, ("reverse",)),
    "set": (lambda items=(): set(distinct(items)), ()),
    "frozenset": (lambda items=(): frozenset(distinct(items)), ()),
    "tuple": (tuple, ()),
    "list": (list, ()),
    "dict": (_dict, ()),
    "float": (float, ()),
    "int": (lambda value=0: int(value if isinstance(value, str) else number(value)), ()),
    "str": (str, ()),
    "bool": (bool, ()),
    "isclose": (math.isclose, ("rel_tol", "abs_tol")),
}
"""Functions that assertions may call, by name: (function, keyword arguments that are allowed)."""

CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau, "inf": math.inf, "nan": math.nan}
"""Constants of the module `math`."""
