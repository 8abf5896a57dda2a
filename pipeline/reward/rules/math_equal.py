"""Decides whether two mathematical answers are equal.

1. The tidied texts are the same (`math_text.py`), or both are numbers, or the truth is words: no algebra is needed.
2. The answer must pass a gate (`math_gate.py`), because it is hostile text and algebra has no bounds of its own. An
   answer that the gate refuses is wrong, unless it is the truth letter by letter.
3. The math-verify library reads both into SymPy. Expressions and equations are compared at fixed points: those that
   agree there to 30 digits are equal (`simplify` and `solve`, which math-verify would call, may take minutes). Tuples,
   sets and matrices are compared element by element, and the rest (unions, inequalities) by math-verify.

math-verify's own time limits are off: they need `signal.alarm`, which stops no C code. The rules have a `budget.py`.
"""

import logging
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from pipeline.reward.rules import math_text
from pipeline.reward.rules.math_gate import MAX_LENGTH, admitted

MAX_ELEMENTS = 12  # of a tuple, set or union
MAX_NODES = 60  # of an expression that math-verify compares
POINTS = ("0.7310592", "-1.2891463", "2.4170385")  # no small number's root, logarithm or ratio
DIGITS = 40  # of a value; `FINE` of a point, which is no fraction because SymPy would factor it
FINE = 60
TOLERANCE = 1e-20  # relative error of equal values; `ROUNDING` where decimals, read to 15 digits, are in them
ROUNDING = 1e-12
ROUNDED = 5e-7  # absolute error of a decimal of six places

INTERVALS = ("()", "(]", "[)", "[]")

_OPEN = re.compile(r"[<>]|\\(?:pm|mp|le|leq|ge|geq|lt|gt|in)(?![a-zA-Z])")
_MEMBER = re.compile(r"\A[a-zA-Z]\s?\\in(?![a-zA-Z])\s?")


class AlgebraError(Exception):
    """SymPy or the parser failed on an answer, as on `\\lceil\\infty\\rceil` or the inverse of a singular matrix."""


def load_algebra() -> None:
    """Import SymPy and build the parser's tables, which takes a second or two."""
    equal("x+0.5", r"\frac{1}{2}+x")


def equal(truth: str, answer: str) -> bool:
    """Whether `answer`, any text, means the same as `truth`; both without `$` or a box around them.

    Raises:
        AlgebraError: algebra failed on one of the two.
    """
    truth, answer = truth.strip(), answer.strip()
    if truth == answer:
        return truth != ""
    if not truth or not answer or len(answer) > 4 * MAX_LENGTH:
        return False
    return _equal(_MEMBER.sub("", math_text.tidy(truth)), _MEMBER.sub("", math_text.tidy(answer)))


def _equal(right: str, given: str) -> bool:
    """`equal` of tidied texts."""
    if not given or not right:
        return False
    if right == given:
        return True
    if math_text.words(right) or math_text.words(given):
        return math_text.letters(right) == math_text.letters(given)
    (digits, base), (given_digits, given_base) = math_text.in_base(right), math_text.in_base(given)
    if base or given_base:
        return digits == given_digits and (base == given_base or not base or not given_base)
    (name, value), (given_name, given_value) = math_text.assigned(right), math_text.assigned(given)
    number, given_number = math_text.number(value), math_text.number(given_value)
    if number is not None and given_number is not None:
        renamed = name and given_name and name != given_name
        return not renamed and math_text.same_number(number, given_number)
    listed, given_listed = math_text.elements(right), math_text.elements(given)
    if listed is not None and given_listed is not None:
        return _equal_lists(*listed, *given_listed)
    if (listed is None) != (given_listed is None) and not _OPEN.search(right + given):
        return False
    return admitted(given) and admitted(right) and _equal_values(right, given)


def _equal_lists(brackets: str, right: list[str], given_brackets: str, given: list[str]) -> bool:
    if brackets != given_brackets or len(right) != len(given) or len(right) > MAX_ELEMENTS:
        return False
    if brackets not in ("{}", "cup"):
        return all(map(_equal, right, given))
    left = list(given)
    for element in right:
        match = next((i for i, other in enumerate(left) if _equal(element, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def _equal_values(truth: str, answer: str) -> bool:
    # Neither library says which exceptions it may raise for hostile text, and about any type has been seen.
    try:
        right, given = _read(truth), _read(answer)
        return right is not None and given is not None and _same(right, given)
    except Exception as error:
        raise AlgebraError(f"{type(error).__name__}: {error}") from error


def _read(text: str) -> Any:
    """The SymPy object of a tidied answer, or None; the ends of an interval are read one by one, which is quicker."""
    from sympy import Expr, Interval

    listed = math_text.elements(text)
    if listed is None or listed[0] not in INTERVALS or len(listed[1]) != 2:
        return _parse(text)
    ends = [_parse(end) for end in listed[1]]
    if not all(isinstance(end, Expr) and end.is_extended_real for end in ends):
        return None
    return Interval(*ends, left_open=text[0] == "(", right_open=text[-1] == ")")


@lru_cache(maxsize=1024)
def _parse(text: str) -> Any:
    """The SymPy object of a tidied answer, or None where math-verify cannot read it."""
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once that its alarms are off
    config = LatexExtractionConfig(boxed_match_priority=0)
    found = parse(rf"\boxed{{{text}}}", [config], fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


def _same(right: Any, given: Any) -> bool:
    import sympy
    from math_verify import verify

    def both(kind: Any) -> bool:
        return isinstance(right, kind) and isinstance(given, kind)

    if right == given:
        return True
    if isinstance(right, sympy.Expr) and isinstance(given, sympy.Eq):
        return _states(given) and _same(right, given.rhs)
    if isinstance(right, sympy.Eq) and isinstance(given, sympy.Expr):
        return _states(right) and _same(right.rhs, given)
    if both(sympy.Eq):
        return _same_equation(right, given)
    if both(sympy.Expr):
        return _same_value(right, given)
    if both(sympy.MatrixBase):
        return right.shape == given.shape and all(map(_same, right.flat(), given.flat()))
    if both(sympy.FiniteSet):
        return len(right) == len(given) and all(any(_same(a, b) for b in given.args) for a in right.args)
    if both(sympy.Tuple):
        return len(right) == len(given) and all(map(_same, right.args, given.args))
    if both(sympy.Interval):
        same_ends = (right.left_open, right.right_open) == (given.left_open, given.right_open)
        return bool(same_ends) and _same(right.start, given.start) and _same(right.end, given.end)
    # From here on math-verify may solve and simplify, so only sets and relations that need it go there.
    for several, other in ((right, given), (given, right)):
        if isinstance(several, sympy.FiniteSet):
            return len(several) == 1 and isinstance(other, sympy.Expr) and _same(several.args[0], other)
    if isinstance(right, sympy.Expr) or isinstance(given, sympy.Expr):
        return False
    if not both(sympy.Basic) or _nodes(right) + _nodes(given) > MAX_NODES:
        return False
    return bool(verify(right, given, timeout_seconds=None))


def _states(equation: Any) -> bool:
    """Whether an equation states what its right side is, as `x=5`, `f(x)=2x` and `2+3=5` do."""
    from latex2sympy2_extended import is_expr_of_only_symbols

    if equation.free_symbols:
        return bool(is_expr_of_only_symbols(equation.lhs))
    return _same(equation.lhs, equation.rhs)


def _same_value(right: Any, given: Any) -> bool:
    import sympy

    floats = bool(right.atoms(sympy.Float)) + bool(given.atoms(sympy.Float))
    for values in _points(right.free_symbols | given.free_symbols):
        a, b = _evaluated(right, values), _evaluated(given, values)
        if a is None or b is None:
            return False
        error, size = abs(a[0] - b[0]) + abs(a[1] - b[1]), abs(a[0]) + abs(a[1])
        if floats == 1 and size > math_text.SMALL:
            near = error <= ROUNDED  # a decimal of six places equals the value that was rounded to it
        else:
            near = error <= (ROUNDING if floats else TOLERANCE) * (size if size > 0 else 1)
        if not near:
            return False
    return True


def _evaluated(expression: Any, values: dict[Any, Any]) -> tuple[Any, Any] | None:
    """Real and imaginary part of an expression at a point; None where it has no finite value, as at a pole."""
    parts = expression.evalf(DIGITS, subs=values).as_real_imag()
    return parts if all(part.is_Float or part.is_Integer for part in parts) else None


def _same_equation(right: Any, given: Any) -> bool:
    """Whether one equation is the other times a constant that is not 0."""
    symbols = right.free_symbols
    if symbols != given.free_symbols:
        return False
    if not symbols:
        return _same(right.rhs, given.rhs)
    ratios = []
    for values in _points(symbols):
        a, b = ((e.lhs - e.rhs).evalf(DIGITS, subs=values) for e in (right, given))
        if not (a.is_Float and b.is_Float) or a == 0 or b == 0:
            return False
        ratios.append(a / b)
    return all(abs(ratio / ratios[0] - 1) <= ROUNDING for ratio in ratios)


def _points(symbols: Any) -> Iterator[dict[Any, Any]]:
    """Values for the symbols, three times; once where there are none."""
    from sympy import Float

    names = sorted(symbols, key=str)
    for point in POINTS[: 3 if names else 1]:
        yield {name: Float(point, FINE) + Float(place, FINE) * 7 / 19 for place, name in enumerate(names)}


def _nodes(expression: Any) -> int:
    from sympy import preorder_traversal

    return sum(1 for _ in preorder_traversal(expression))
