"""Compare two mathematical answers: the ground truth and the answer of a response.

1. Answers with the same normalised text (`math_text.py`), two numbers, and words are compared without algebra.
2. Other answers must pass a gate (`math_gate.py`) that limits the cost of algebra, since the text may be hostile. An
   answer that the gate refuses is wrong, unless its text is the same as the ground truth.
3. The math-verify library reads both into SymPy; decimals are exact fractions. Results of plain arithmetic on numbers
   are compared exactly. Other expressions, and equations, are compared by their values at points that are drawn from a
   hash of both texts, so an answer cannot be made to agree at these points only. (math-verify would call `simplify` and
   `solve`, which may take minutes.) Tuples, sets and matrices are compared element by element; only the rest (unions,
   inequalities) is compared by math-verify.

math-verify's own time limits are off: they need `signal.alarm`, which does not stop C code. The rules have a limit of
CPU time instead (`budget.py`).
"""

import hashlib
import logging
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

from pipeline.reward.rules import math_text
from pipeline.reward.rules.math_gate import MAX_LENGTH, admitted

MAX_ELEMENTS = 12  # of a tuple, set or union
MAX_NODES = 60  # of an expression that math-verify compares
POINTS = 4  # that must agree; two lie between 0.2 and 3, and the others within a million
TRIES = 12  # points tried, as an expression may have no value at one
DIGITS = 1100  # of a value: as many places as the gate lets a number have
FINE = 60  # digits of a point; SymPy would factor a fraction
TOLERANCE = "1e-1050"
MAX_BITS = 20_000  # of an exact number
PLACES = 6  # of a decimal that stands for the number that was rounded to it

INTERVALS = ("()", "(]", "[)", "[]")

_OPEN = re.compile(r"[<>]|\\(?:pm|mp|le|leq|ge|geq|lt|gt|in)(?![a-zA-Z])")
_MEMBER = re.compile(r"\A[a-zA-Z]\s?\\in(?![a-zA-Z])\s?")

_LETTER = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mathbb)\s?\{[^{}]*\}|\\[a-zA-Z]+|([a-zA-Z])")
_FREE = "qwzkvmnpusabcyxtr"  # letters other than constants, functions and differentials


class AlgebraError(Exception):
    """SymPy or the parser failed, for example on `\\lceil\\infty\\rceil` or the inverse of a singular matrix."""


def load_algebra() -> None:
    """Import SymPy and build the parser's tables in advance, which takes one or two seconds."""
    equal("x+0.5", r"\frac{1}{2}+x")


def equal(truth: str, answer: str) -> bool:
    """Return True if `answer` (any text) is mathematically equal to `truth`. Both are without `$` or a box around them.

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
    """Compare two answers like `equal`. Both are normalised (`math_text.tidy`)."""
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
    if "'" in value + given_value:
        return False  # derivatives, which the parser reads as the functions themselves
    if "'" in name + given_name:
        return (name == given_name or not (name and given_name)) and _equal(value, given_value)
    return admitted(given) and admitted(right) and _equal_values(right, given, _rounding(number or given_number))


def _rounding(decimal: math_text.Number | None) -> Fraction:
    """Return the allowed rounding error of a decimal: half of its last place, if it has at least `PLACES` places, else
    0."""
    places = 0 if decimal is None else decimal.places or 0
    if decimal is None or places < PLACES or abs(decimal.value) < math_text.SMALL:
        return Fraction(0)
    return Fraction(1, 2 * 10**places)


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


def _equal_values(truth: str, answer: str, rounding: Fraction) -> bool:
    apart = _apart(truth, answer)
    if apart is None:
        return False
    truth, answer = apart
    seed = hashlib.sha256(f"{truth}\n{answer}".encode()).digest()
    # Neither library documents which exceptions hostile text may raise, and nearly any type has been seen.
    try:
        right, given = _read(truth), _read(answer)
        return right is not None and given is not None and _Comparison(seed, rounding).same(right, given)
    except Exception as error:
        raise AlgebraError(f"{type(error).__name__}: {error}") from error


def _apart(truth: str, answer: str) -> tuple[str, str] | None:
    """Rename capital letters if the same small letter also occurs in the texts, since the parser does not tell them
    apart.

    Returns (truth, answer), or None if there are too few unused letters.
    """
    used = {letter for text in (truth, answer) for letter in _LETTER.findall(text) if letter}
    capitals = sorted(letter for letter in used if letter.isupper() and letter.lower() in used)
    free = [letter for letter in _FREE if not used & {letter, letter.upper()}]
    if len(free) < len(capitals):
        return None
    other = dict(zip(capitals, free, strict=False))

    def renamed(match: re.Match[str]) -> str:
        return other.get(match[1], match[0])

    return _LETTER.sub(renamed, truth), _LETTER.sub(renamed, answer)


def _read(text: str) -> Any:
    """Parse a normalised answer to a SymPy object; None if it cannot be read. The ends of an interval are parsed one by
    one, which is faster."""
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
    """Parse a normalised answer to a SymPy object with math-verify; None if it cannot be read."""
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once that its alarms are off
    config = LatexExtractionConfig(boxed_match_priority=0)
    found = parse(rf"\boxed{{{text}}}", [config], fallback_mode="no_fallback", parsing_timeout=None)
    return _with_fractions(found[0]) if found else None


def _with_fractions(parsed: Any) -> Any:
    """Replace the decimals in a SymPy object by exact fractions."""
    from sympy import Float, Rational

    if not hasattr(parsed, "atoms"):
        return parsed
    return parsed.xreplace({number: Rational(str(number)) for number in parsed.atoms(Float)})


class _Comparison:
    """Compares two SymPy objects.

    Args:
        seed: seed of the points at which expressions are evaluated.
        rounding: difference up to which numbers count as equal.
    """

    def __init__(self, seed: bytes, rounding: Fraction) -> None:
        self._seed, self._rounding = seed, rounding

    def same(self, right: Any, given: Any) -> bool:
        import sympy
        from math_verify import verify

        def both(kind: Any) -> bool:
            return isinstance(right, kind) and isinstance(given, kind)

        if right == given:
            return True
        if isinstance(right, sympy.Expr | sympy.FiniteSet) and isinstance(given, sympy.Eq):
            return self._states(given) and self.same(right, given.rhs)
        if isinstance(right, sympy.Eq) and isinstance(given, sympy.Expr | sympy.FiniteSet):
            return self._states(right) and self.same(right.rhs, given)
        if both(sympy.Eq):
            return self._same_equation(right, given)
        if both(sympy.Expr):
            return self._same_value(right, given)
        if both(sympy.MatrixBase):
            return right.shape == given.shape and all(map(self.same, right.flat(), given.flat()))
        if both(sympy.FiniteSet):
            return len(right) == len(given) and all(any(self.same(a, b) for b in given.args) for a in right.args)
        if both(sympy.Tuple):
            return len(right) == len(given) and all(map(self.same, right.args, given.args))
        if both(sympy.Interval):
            same_ends = (right.left_open, right.right_open) == (given.left_open, given.right_open)
            return bool(same_ends) and self.same(right.start, given.start) and self.same(right.end, given.end)
        # From here on math-verify may solve and simplify, so only sets and relations that need it go there.
        for several, other in ((right, given), (given, right)):
            if isinstance(several, sympy.FiniteSet):
                return len(several) == 1 and isinstance(other, sympy.Expr) and self.same(several.args[0], other)
        if isinstance(right, sympy.Expr) or isinstance(given, sympy.Expr):
            return False
        if not both(sympy.Basic) or _nodes(right) + _nodes(given) > MAX_NODES:
            return False
        return bool(verify(right, given, timeout_seconds=None))

    def _states(self, equation: Any) -> bool:
        """Return True if the equation only names its right side (`x=5`, `f(x)=2x`), or is true (`2+3=5`)."""
        from latex2sympy2_extended import is_expr_of_only_symbols

        if equation.free_symbols:
            return bool(is_expr_of_only_symbols(equation.lhs))
        return self.same(equation.lhs, equation.rhs)

    def _same_value(self, right: Any, given: Any) -> bool:
        exact, exact_given = _exact(right), _exact(given)
        if exact is not None and exact_given is not None:
            return abs(exact - exact_given) <= self._rounding
        symbols = right.free_symbols | given.free_symbols
        rounding = 0 if symbols else _float(self._rounding)
        agreed = 0
        for values in self._points(symbols):
            a, b = _evaluated(right, values), _evaluated(given, values)
            if a is None and b is None:
                continue
            if a is None or b is None:
                return False
            error, size = abs(a[0] - b[0]) + abs(a[1] - b[1]), abs(a[0]) + abs(a[1])
            if error > max(_float(TOLERANCE) * max(size, 1), rounding):
                return False
            agreed += 1
            if agreed == POINTS or not symbols:
                return True
        return False

    def _same_equation(self, right: Any, given: Any) -> bool:
        """Return True if one equation is the other one multiplied by a constant that is not 0."""
        symbols = right.free_symbols
        if symbols != given.free_symbols:
            return False
        if not symbols:
            return self.same(right.rhs, given.rhs)
        ratios: list[Any] = []
        for values in self._points(symbols):
            a, b = (_evaluated(equation.lhs - equation.rhs, values) for equation in (right, given))
            real, real_given = a is not None and not a[1], b is not None and not b[1]
            if not real and not real_given:
                continue
            if a is None or b is None or a[1] or b[1] or not a[0] or not b[0]:
                return False
            ratios.append(a[0] / b[0])
            if abs(ratios[-1] / ratios[0] - 1) > _float(TOLERANCE):
                return False
            if len(ratios) == POINTS:
                return True
        return False

    def _points(self, symbols: Any) -> Iterator[dict[Any, Any]]:
        """Yield `TRIES` points; each maps the symbols to values."""
        from sympy import Float

        names = sorted(symbols, key=str)
        for number in range(TRIES):
            point = {}
            for place, name in enumerate(names):
                drawn = hashlib.sha256(self._seed + f"{number} {name}".encode()).digest()
                share = int.from_bytes(drawn) / Float(2**256, FINE)
                size = Float("0.2", FINE) + share * (Float("2.8", FINE) if number % 4 in (0, 3) else 10**6)
                # Four points have all four pairs of signs of two letters.
                point[name] = -size if number >> place % 2 & 1 else size
            yield point


def _float(number: Fraction | str) -> Any:
    from sympy import Float

    if isinstance(number, str):
        return Float(number, DIGITS)
    return Float(number.numerator, DIGITS) / number.denominator


def _exact(expression: Any) -> Fraction | None:
    """Compute an expression of rational numbers with the four operations and whole powers exactly; None for others."""
    if expression.is_Rational:
        return Fraction(int(expression.p), int(expression.q))
    if not (expression.is_Add or expression.is_Mul or expression.is_Pow):
        return None
    parts = [_exact(part) for part in expression.args]
    if None in parts:
        return None
    numbers = [part for part in parts if part is not None]
    if expression.is_Pow:
        base, power = numbers
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if power.denominator != 1 or bits * abs(power) > MAX_BITS or (not base and power < 0):
            return None
        return base ** int(power)
    return sum(numbers, Fraction(0)) if expression.is_Add else math.prod(numbers, start=Fraction(1))


def _evaluated(expression: Any, values: dict[Any, Any]) -> tuple[Any, Any] | None:
    """Return (real part, imaginary part) of an expression at the point `values`; None if it is not finite there."""
    parts = expression.evalf(DIGITS, subs=values, maxn=4 * DIGITS).as_real_imag()
    return parts if all(part.is_Float or part.is_Integer for part in parts) else None


def _nodes(expression: Any) -> int:
    from sympy import preorder_traversal

    return sum(1 for _ in preorder_traversal(expression))
