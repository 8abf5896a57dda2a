"""Normalise the LaTeX text of mathematical answers, and read numbers, words and lists from it, in linear time."""

import re
from dataclasses import dataclass
from fractions import Fraction

from pipeline.reward.rules import quantity

SMALL = 0.001  # below it, six places are not enough to tell numbers apart

_UNICODE = str.maketrans(
    {
        "\u2019": "'", "\u2032": "'",
        "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00f7": "/", "\u03c0": r"\pi ",
        "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u222a": r"\cup ", "\u2229": r"\cap ",
        "\u00b2": "^2", "\u00b3": "^3", "\u00b0": "", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
        "\u20ac": "", "\u00a3": "", "\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}",
    }
)  # fmt: skip
# MATH writes 10,080 as `10,\!080` or `10{,}080`; such a comma parts thousands even inside a tuple.
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:,\\!|\\!,|\{,\}(?:\\!)?|\\!)\d{3}(?!\d))+")
_GONE = re.compile(
    r"(?<!\\)\\[!,;:> ]|~|\\(?:left|right|displaystyle|textstyle|limits|bigl|bigr|big|Big|quad|qquad)(?![a-zA-Z])"
    r"|\^\{?\\circ\}?|\\degree(?![a-zA-Z])|\\?[$%]|(?<=\d)\s?percent(?![a-zA-Z])"
)
_PRIME = re.compile(r"\^\s?(?:\{\s?\\prime\s?\}|\\prime(?![a-zA-Z]))")
_FRACTION = re.compile(r"\\[dtc](frac|binom)(?![a-zA-Z])")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:(\d)\s*(\d)|\{([^{}]{1,99})\}\s*(\d)|(\d)\s*\{([^{}]{1,99})\})")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\d)")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|rm)\s*\{([^{}]{0,200})\}")
_WRITTEN = re.compile(rf"\A\s*{_TEXT.pattern}\s*\Z")  # the whole answer is text
_UNIT = re.compile(r"(?<=[\d}) ])\s*\\(?:text|mbox|mathrm|textrm)\s*\{([^{}]{0,200})\}(?:\^\{?-?\d\}?)?\.?\s*\Z")
_UNIT_TEXT = re.compile(r"[A-Za-z\s./()\u00b5-]*(?:\^?[23])?\s*")
_ASSIGNED = re.compile(r"\A(\\?[a-zA-Z]{1,7}'{0,3}\s?(?:_\s?\w)?(?:\(\w\))?'{0,3})\s?=\s?([^=]+)\Z")
_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:,\d{3})+|(?:\s\d{3})+)(?![\d,]|\s\d)")
_IMAGINARY = re.compile(r"(?<=\d)(?: |\\cdot ?)(?=i(?![a-zA-Z]))")  # else the parser takes the i for a letter
_SPACE = re.compile(r"\s+")
_AND = re.compile(r"\s*,?\s*\\(?:text|mbox)\s*\{\s*(?:and|or)\s*\}\s*|(?<=[\d})])\s*,?\s(?:and|or)\s|,\s(?:and|or)\s")
_TOKEN = re.compile(r"\\[{}]|\\cup(?![a-zA-Z])|\\.|[(){}\[\],;]", re.DOTALL)

_DECIMAL = r"(?:[0-9]{1,100}(?:\.[0-9]{0,100})?|\.[0-9]{1,100})"
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?:(?P<whole>[0-9]{1,100})(?:\s|(?=\\frac)))?"
    rf"(?:\\frac\{{(?P<top>[-+]?{_DECIMAL})\}}\{{(?P<bottom>[-+]?{_DECIMAL})\}}"
    rf"|(?P<above>{_DECIMAL})(?:/(?P<below>{_DECIMAL}))?)"
    r"(?:\\(?:times|cdot)\s?10\^\{?(?P<power>[-+]?[0-9]{1,2})\}?)?"
)
_WORD = r"[A-Za-z]{2,20}"
_COUNTED = re.compile(rf"(.{{1,200}}?) (?=[A-Za-z]*[AEIOUaeiou])([A-Za-z]{{3,20}}(?: {_WORD}){{0,3}})")
# A word of a formula, not a unit. A unit in `\text{...}` must not hold `is` or `not` either.
_FORMULA = re.compile(
    r"(?i:times|less|more|base|root|power|sqrt|sin|cos|tan|cot|sec|csc|log|exp|alpha|beta|gamma|delta|theta|lambda|sigma"
    r"|omega|is|not|wrong|maybe)"
)
_WORDS = re.compile(r"[A-Z][a-z]{2,}|(?i:true|false|yes|no)")
_IN_BASE = re.compile(r"\(?(?=[A-Fa-f.]{0,99}[0-9])([0-9A-Fa-f.]{1,100})\)?_\{?\(?([0-9]{1,2})\)?\}?")


@dataclass(frozen=True)
class Number:
    """An exact number. `places` is the number of decimal places in its text; None without a decimal point."""

    value: Fraction
    places: int | None


def tidy(answer: str) -> str:
    """Normalise an answer: remove spacing commands, currency and percent signs and units after a number, and write
    equal LaTeX forms in one way.

    Spaces are kept only between characters that would otherwise run together.
    """
    text = _GONE.sub(" ", _THOUSANDS.sub(_digits, answer.translate(_UNICODE))).replace("{,}", ",").strip()
    text = _PRIME.sub("'", text)
    written = _WRITTEN.match(text)
    if written is not None and re.search(r"[\d,]", written[1]):
        text = written[1].strip()
    unit = _UNIT.search(text)
    if unit is not None and not _TEXT.search(text[: unit.start()]) and not _TEXT.fullmatch(text):
        text = text[: unit.start()] + ("" if _is_unit(unit[1]) else f" {unit[1]}")
    text = _FRACTION.sub(r"\\\1", text)
    text = _SHORT_FRACTION.sub(lambda m: rf"\frac{{{m[1] or m[3] or m[5]}}}{{{m[2] or m[4] or m[6]}}}", text)
    text = re.sub(r"\\varnothing(?![a-zA-Z])", r"\\emptyset", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = _IMAGINARY.sub("", _AND.sub(",", _SPACE.sub(" ", text))).strip()
    while text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    if not text.startswith(("(", "[", "\\{")):  # there a comma separates numbers, as in (1,234)
        text = _GROUPED.sub(_digits, text)
    counted = _COUNTED.fullmatch(text)
    if counted is not None and _is_unit(counted[2]):
        alone = _squeezed(counted[1])
        if number(assigned(alone)[1]) is not None:
            return alone
    return _squeezed(text)


def _digits(match: re.Match[str]) -> str:
    return re.sub(r"[^\d]", "", match[0])


def _is_unit(text: str) -> bool:
    """Return True if `text` after a number is a unit, which does not change the number."""
    return _UNIT_TEXT.fullmatch(text) is not None and not any(
        quantity.changes(word) or _FORMULA.fullmatch(word) for word in re.findall(r"[A-Za-z]+", text)
    )


def _squeezed(text: str) -> str:
    return re.sub(r"(?<=[^\w]) | (?=[^\w\\])", "", text)


def words(answer: str) -> str | None:
    r"""Return the words of a normalised answer, in the form of `letters`; None if it is not only words.

    Words are text in a `\text{...}`, one capital letter, a capitalised word, and true, false, yes and no.
    """
    text, wraps = _TEXT.subn(r"\1", answer)
    text = re.sub(r"[(){}\s.]", "", text)
    if not text.isalpha() or not (wraps or (len(text) == 1 and text.isupper()) or _WORDS.fullmatch(text)):
        return None
    return letters(text)


def letters(answer: str) -> str:
    """Remove brackets, spaces and full stops from an answer, and convert it to lower case (not a single letter)."""
    text = re.sub(r"[(){}\s.]", "", _TEXT.sub(r"\1", answer))
    return text if len(text) == 1 else text.casefold()


def in_base(answer: str) -> tuple[str, str]:
    """Return (digits, base) of a normalised number such as `2012_7`; the base is "" if the answer has none."""
    match = _IN_BASE.fullmatch(answer)
    digits, base = (answer, "") if match is None else (match[1], match[2])
    return digits.lstrip("0").casefold(), base.lstrip("0")


def assigned(answer: str) -> tuple[str, str]:
    """Return (name, value) of a normalised answer such as `x=5`; ("", answer) if it has another form."""
    match = _ASSIGNED.fullmatch(answer)
    return ("", answer) if match is None else (match[1].strip(), match[2].strip())


def elements(answer: str) -> tuple[str, list[str]] | None:
    r"""Return (brackets, elements) of a normalised answer with several elements; None for a single element.

    The brackets are `()`, `[)` and the like for tuples and intervals, `{}` for sets and for lists without brackets, and
    `cup` for a union. The elements may hold brackets themselves; `[` may end with `)`.
    """
    united = _split(answer, ("cup",))
    if united is None or len(united) > 1:
        return None if united is None else ("cup", united)
    if answer.startswith(("(", "[", "\\{")) and answer.endswith((")", "]", "}")):
        opening = 2 if answer[0] == "\\" else 1
        closing = 2 if answer.endswith("\\}") else 1
        inside = _split(answer[opening:-closing], (",", ";"))
        # None: the first bracket closes before the end, as in `(1,2),(3,4)`.
        if inside is not None:
            return (f"{answer[opening - 1]}{answer[-1]}", inside) if len(inside) > 1 else None
    listed = _split(answer, (",", ";"))
    return ("{}", listed) if listed is not None and len(listed) > 1 else None


def _split(text: str, separators: tuple[str, ...]) -> list[str] | None:
    """Split a text at separators outside of brackets; None if brackets do not match."""
    parts = []
    depth = start = 0
    for match in _TOKEN.finditer(text):
        token = match[0].lstrip("\\")
        if token in ("(", "[", "{"):
            depth += 1
        elif token in (")", "]", "}"):
            depth -= 1
            if depth < 0:
                return None
        elif depth == 0 and token in separators:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()] if depth == 0 else None


def number(answer: str) -> Number | None:
    r"""Read a normalised answer as a number: an integer, a decimal, `a/b`, `\frac{a}{b}`, mixed, or `a \times 10^b`.

    None if the answer is anything else, or divides by zero.
    """
    match = _NUMBER.fullmatch(answer)
    if match is None:
        return None
    above = match["top"] or match["above"]
    below = match["bottom"] or match["below"]
    if match["whole"] and not (below and above.isdigit() and below.isdigit()):
        return None
    if below and Fraction(below) == 0:
        return None
    value = Fraction(match["whole"] or 0) + Fraction(above) / Fraction(below or 1)
    value *= Fraction(10) ** int(match["power"] or 0)
    places = len(above.partition(".")[2]) if "." in above and not below and not match["power"] else None
    return Number(-value if match["sign"] == "-" else value, places)


def same_number(a: Number, b: Number) -> bool:
    """Return True if two numbers are equal. A decimal with six places or more also equals the fraction that it
    rounds."""
    if a.value == b.value:
        return True
    if (a.places is None) == (b.places is None) or abs(a.value) < SMALL:
        return False
    places = a.places or b.places or 0
    return places >= 6 and 2 * abs(a.value - b.value) <= Fraction(1, 10**places)
