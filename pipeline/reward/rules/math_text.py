r"""Mathematical answers as text: their tidied LaTeX, and those that are plain numbers or plain words.

Most answers need no algebra. `tidy` takes away what does not change an answer (spacing and size commands, dollar and
percent signs, degrees, units behind a number, a full stop), `number` reads what is then a number, and `words` what is
text. Time is linear in the length, which the callers bound.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

SMALL = 0.001  # below it, six places are not enough to tell numbers apart

_UNICODE = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00f7": "/", "\u03c0": r"\pi ",
        "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u222a": r"\cup ", "\u2229": r"\cap ",
        "\u00b2": "^2", "\u00b3": "^3", "\u00b0": "", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
        "\u20ac": "", "\u00a3": "", "\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}",
    }
)  # fmt: skip
_GONE = re.compile(
    r"(?<!\\)\\[!,;:> ]|~|\\(?:left|right|displaystyle|textstyle|limits|bigl|bigr|big|Big|quad|qquad)(?![a-zA-Z])"
    r"|\^\{?\\circ\}?|\\degree(?![a-zA-Z])|\\?[$%]|(?<=\d)\s?percent(?![a-zA-Z])"
)
_FRACTION = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:(\d)\s*(\d)|\{([^{}]{1,99})\}\s*(\d)|(\d)\s*\{([^{}]{1,99})\})")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\d)")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|rm)\s*\{([^{}]{0,200})\}")
_UNIT = re.compile(r"(?<=[\d}) ])\s*\\(?:text|mbox|mathrm|textrm)\s*\{[^{}]{0,200}\}(?:\^\{?-?\d\}?)?\.?\s*\Z")
_ASSIGNED = re.compile(r"\A(\\?[a-zA-Z]{1,7}\s?(?:_\s?\w)?)\s?=\s?([^=]+)\Z")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,|\{,\}|\s)\d{3})+(?![\d,])")
_SPACE = re.compile(r"\s+")
_AND = re.compile(r"\s*,?\s*\\(?:text|mbox)\s*\{\s*(?:and|or)\s*\}\s*|(?<=[\d})])\s*,?\s(?:and|or)\s")
_TOKEN = re.compile(r"\\[{}]|\\cup(?![a-zA-Z])|\\.|[(){}\[\],;]", re.DOTALL)

_INTEGER, _DECIMAL = r"[0-9]{1,100}", r"[0-9]{1,100}(?:\.[0-9]{0,100})?|\.[0-9]{1,100}"
_SIGNED = re.compile(rf"([-+]?)({_DECIMAL})")
_RATIO = re.compile(rf"([-+]?)(?:\\frac\{{([-+]?)({_DECIMAL})\}}\{{([-+]?)({_DECIMAL})\}}|({_DECIMAL})/({_DECIMAL}))")
_MIXED = re.compile(rf"([-+]?)({_INTEGER})(?:\\frac\{{({_INTEGER})\}}\{{({_INTEGER})\}}|\s({_INTEGER})/({_INTEGER}))")
_MANTISSA = re.compile(rf"([-+]?)({_DECIMAL})\\(?:times|cdot)\s?10\^\{{?([-+]?[0-9]{{1,2}})\}}?")


@dataclass(frozen=True)
class Number:
    """A number an answer states, and how many decimal places it was given with (None: no decimal point)."""

    value: Fraction
    places: int | None


def tidy(answer: str) -> str:
    """The answer without what does not change it; blanks stay only between two things that would run together."""
    text = _GONE.sub(" ", answer.translate(_UNICODE)).replace("{,}", ",").strip()
    text = _UNIT.sub("", text) if not _TEXT.fullmatch(text) else text
    text = _FRACTION.sub(r"\\frac", text)
    text = _SHORT_FRACTION.sub(lambda m: rf"\frac{{{m[1] or m[3] or m[5]}}}{{{m[2] or m[4] or m[6]}}}", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = _AND.sub(",", _SPACE.sub(" ", text)).strip()
    while text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    if not text.startswith(("(", "[", "\\{")):  # where a comma parts numbers, as in (1,234)
        text = _GROUPED.sub(lambda m: re.sub(r"[^\d]", "", m[0]), text)
    return re.sub(r"(?<=[^\w]) | (?=[^\w\\])", "", text)


def words(answer: str) -> str | None:
    r"""The words of a tidied answer that is text in a `\text{...}` or one capital letter, without brackets and case.

    None where it is anything else.
    """
    text, wraps = _TEXT.subn(r"\1", answer)
    text = re.sub(r"[(){}\s.]", "", text)
    if not text.isalpha() or not (wraps or (len(text) == 1 and text.isupper())):
        return None
    return text if len(text) == 1 else text.casefold()


def letters(answer: str) -> str:
    """The answer as `words` writes it, whatever it holds."""
    text = re.sub(r"[(){}\s.]", "", _TEXT.sub(r"\1", answer))
    return text if len(text) == 1 else text.casefold()


def assigned(answer: str) -> tuple[str, str]:
    """Name and value of a tidied `x=5`; the name is "" where the answer is no such thing."""
    match = _ASSIGNED.fullmatch(answer)
    return ("", answer) if match is None else (match[1].strip(), match[2].strip())


def elements(answer: str) -> tuple[str, list[str]] | None:
    r"""Brackets and elements of a tidied answer that lists several, or None where it is a single thing.

    The brackets are `()`, `[)` and the like for tuples and intervals, `{}` for sets and for lists without brackets,
    and `cup` for a union. Brackets inside are left as they are; `[` may end with `)`.
    """
    depth, cuts, unions, closed = 0, [], [], -1
    tokens = [(match[0].lstrip("\\") or match[0], match.start(), match.end()) for match in _TOKEN.finditer(answer)]
    bracketed = answer.startswith(("(", "[", "\\{"))
    for token, start, end in tokens:
        if token in ("(", "[", "{"):
            depth += 1
        elif token in (")", "]", "}"):
            depth -= 1
            if depth == 0 and closed < 0:
                closed = end
        elif token == "cup" and depth == 0:
            unions.append((start, end))
        elif token in (",", ";"):
            cuts.append((depth, start, end))
    if depth != 0:
        return None
    if unions:
        return "cup", _split(answer, unions, 0, len(answer))
    whole = bracketed and closed == len(answer)
    places = [(start, end) for level, start, end in cuts if level == int(whole)]
    if not places:
        return None
    if not whole:
        return "{}", _split(answer, places, 0, len(answer))
    opening = 2 if answer[0] == "\\" else 1
    closing = 2 if answer.endswith("\\}") else 1
    brackets = f"{answer[opening - 1]}{answer[-1]}"
    return brackets, _split(answer, places, opening, len(answer) - closing)


def _split(text: str, places: list[tuple[int, int]], first: int, last: int) -> list[str]:
    starts, ends = [first, *(end for _, end in places)], [*(start for start, _ in places), last]
    return [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def number(answer: str) -> Number | None:
    r"""The number that a tidied answer is: an integer, a decimal, `a/b`, `\frac{a}{b}`, mixed, or `a \times 10^b`.

    None where it is anything else, or divides by zero.
    """
    if match := _SIGNED.fullmatch(answer):
        return Number(_signed(match[1], match[2]), len(match[2].partition(".")[2]) if "." in match[2] else None)
    if match := _MIXED.fullmatch(answer):
        below = int(match[4] or match[6])
        if below == 0:
            return None
        value = int(match[2]) + Fraction(int(match[3] or match[5]), below)
        return Number(-value if match[1] == "-" else value, None)
    if match := _RATIO.fullmatch(answer):
        above = _signed(match[2] or "", match[3] or match[6])
        below_ = _signed(match[4] or "", match[5] or match[7])
        if below_ == 0:
            return None
        return Number((-1 if match[1] == "-" else 1) * above / below_, None)
    if match := _MANTISSA.fullmatch(answer):
        return Number(_signed(match[1], match[2]) * Fraction(10) ** int(match[3]), None)
    return None


def same_number(a: Number, b: Number) -> bool:
    """Whether two numbers are equal; a decimal of six places or more also equals the fraction it was rounded from."""
    if a.value == b.value:
        return True
    if (a.places is None) == (b.places is None) or abs(a.value) < SMALL:
        return False
    places = a.places or b.places or 0
    return places >= 6 and 2 * abs(a.value - b.value) <= Fraction(1, 10**places)


def _signed(sign: str, digits: str) -> Fraction:
    value = Fraction(digits if not digits.startswith(".") else f"0{digits}")
    return -value if sign == "-" else value
