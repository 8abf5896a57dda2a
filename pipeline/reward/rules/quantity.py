"""Decide whether the text after a number changes it: a unit does not, `million` does."""

import re
import unicodedata
from itertools import dropwhile
from string import ascii_letters


def _words(text: str) -> frozenset[str]:
    """Split a text into words; a word that ends with `(s)` stands for the forms with and without it."""
    return frozenset(form for word in text.split() for form in (word.removesuffix("(s)"), word.replace("(s)", "s")))


SCALES = _words(
    "tens hundred(s) thousand(s) million(s) billion(s) trillion(s) quadrillion(s) quintillion(s) milliard(s) dozen(s) "
    "lac(s) lakh(s) crore(s) mio mrd millionen milliarden millones"
)
PARTS = _words(
    "half halves quarter third(s) fourth(s) fifth(s) sixth(s) seventh(s) eighth(s) ninth(s) tenth(s) hundredth(s) "
    "thousandth(s)"
)
NUMBERS = _words(
    "zero two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety infinity infinite"
)
CHANGES = _words("point squared cubed factorial")
OPERATIONS = CHANGES | _words(
    "or v vs versus plus minus over divided multiplied raised doubled tripled halved mod modulo"
)
"""Words that, right after a number, continue a formula."""
_LETTERS = _words("k K M B mil mn bn mln bln pi x y z n")
"""Abbreviations of scales, and letters that stand for numbers."""
_SIGNS = frozenset("\u2030\u2031\u03c0")  # per mille, per ten thousand, pi
_JOINING = _words("and a an one")
_SHARED = _words("third fourth fifth sixth seventh eighth ninth tenth")
"""Words for fractions that may also be ordinals, as in `42 third graders`; they count as fractions only after a joining
word (`and`, `a`)."""
_GLUED = _words(
    "mm cm dm m km mi in ft yd feet foot inch inches mg g kg lb lbs oz ml mL cl dl l L s sec secs min mins h hr hrs "
    "day days am pm AM PM mph kph kmh cent cents c C F st nd rd th"
)
"""Units that may follow a number without a space."""

LONGEST = 200  # characters after a number that are looked at in running text

_LENGTH = r"(?:[mckd]?m|in|ft|yd|mi|feet|foot|inch(?:es)?|yards?|miles?|(?:centi|kilo|milli)?met(?:er|re)s?)"
_EXPONENT = re.compile(rf"(?<![^\W\d_])({_LENGTH})(?:\^\{{?[23]\}}?|[\u00b2\u00b3])(?![\w^])|\^\{{?\\circ\}}?")
_POWER = re.compile(r"[\^\u207b]|_\w")
_WORD = re.compile(r"[^\W\d_]+(?:[&'\u2019\u2010\u2011-][^\W\d_]+)*")
_PHRASE = re.compile(rf"[ \t*_$%)\]}}\"'`\\\u2010\u2011-]{{0,9}}((?:{_WORD.pattern}[ \t-]{{0,3}}){{0,4}})")
_FORMULA = re.compile(r"\A\s{0,9}!|[=^+~\u00b1\u00d7\u00f7\u221a\u221e\u2248]|\\(?!text|mathrm)[a-zA-Z]")


def without_exponents(text: str) -> str:
    """Remove exponents that belong to units: `cm^2` becomes `cm`, and `^\\circ` is removed."""
    return _EXPONENT.sub(r"\1", text)


def changes(word: str) -> bool:
    """Return True if a word after a number changes it: the word stands for a number or an operation."""
    return word in _LETTERS or word.casefold() in SCALES | PARTS | NUMBERS | OPERATIONS


def goes_on(behind: str) -> bool:
    """Return True if the text right after a number changes it: `k`, ` million`, ` and a half`, `^2`.

    Latin letters that follow without a space change it unless they are a known unit (`42km`).
    """
    if any(map(is_numeric, behind[:1])) or behind[:1] in _SIGNS or _POWER.match(behind):
        return True
    glued = behind[: len(behind) - len(behind.lstrip(ascii_letters))]
    if glued:
        return glued not in _GLUED
    words = _next_words(behind)
    rest = [word.casefold() for word in dropwhile(_JOINING.__contains__, words)]
    parts = PARTS if len(rest) < len(words) else PARTS - _SHARED
    return any(word in _LETTERS or word in CHANGES for word in words[:1]) or not (SCALES | parts).isdisjoint(rest[:1])


def goes_on_in_line(behind: str) -> bool:
    """Return True if the rest of the line after a number changes the number.

    This is stricter than `goes_on`: an operator, a digit or a number as a word anywhere in the line counts too.
    """
    return (
        goes_on(behind)
        or any(map(is_numeric, behind))
        or _FORMULA.search(behind) is not None
        or any(word.casefold() in OPERATIONS or _counts(word) for word in _next_words(behind)[:1])
        or any(word.casefold() in SCALES | NUMBERS | {"half"} for word in _WORD.findall(behind))
    )


def _counts(word: str) -> bool:
    """Return True if a word is a number with a hyphen, such as `forty-two`."""
    tens, hyphen, ones = word.casefold().partition("-")
    return hyphen != "" and tens in NUMBERS and ones in NUMBERS | {"one"}


def _next_words(behind: str) -> list[str]:
    """Return the first words after a number; empty if other characters than spaces and closing marks precede them."""
    phrase = _PHRASE.match(behind)
    return _WORD.findall(phrase[1]) if phrase is not None else []


def is_numeric(character: str) -> bool:
    """Return True if a character of any script is a number: a digit, `\u00bd`, `\u00b2`, `\u4e07`."""
    return unicodedata.numeric(character, None) is not None
