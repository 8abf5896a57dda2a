"""Decide which answers may be given to the LaTeX parser and to computer algebra: only small ones of known commands.

The parser's time doubles with each level of brackets or indices, and algebra computes `9^{9^9}` digit by digit. So
length, nesting, powers, functions and factorials are limited on the text, in linear time.
"""

import re

MAX_LENGTH = 300  # characters of a tidied answer that is parsed
MAX_DEPTH = 4  # brackets inside each other
MAX_DIGITS = 30  # of one number
MAX_SMALL_DIGITS = 3  # of each number next to `\exp` or `\binom`
MAX_POWER = 1000  # product of all numbers in exponents
MAX_SMALL_POWER = 60  # the same with letters or rounding, which expand the power
LETTER_POWER = 3  # what each letter of an exponent counts as in that product
MAX_SIGNS = 40  # operators and commands
MAX_SCRIPTS = 8  # exponents and indices
MAX_LETTERS = 20  # outside commands
MAX_FUNCTIONS = 2  # logarithms, sines, roundings and the like
MAX_BARS = 4  # of absolute values

_FUNCTIONS = "(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp|[lr]floor|[lr]ceil|binom"
_COMMANDS = re.compile(
    f"{_FUNCTIONS}|frac|sqrt|cdot|times|div|pm|mp|lt|gt|leq?|geq?|neq?|in|cup|cap|setminus|emptyset|varnothing|infty|"
    "mathbb|text|textbf|mathrm|mathbf|begin|end|pi|alpha|beta|gamma|delta|theta|lambda|mu|rho|sigma|phi|omega"
)
_MATRIX = re.compile(r"(?:[^\\^]|\\frac)*\\begin\{([pbv]?matrix|array)\}(?:(?!\\begin|\\end).)*\\end\{\1\}\\?[)}\]]*")
_FUNCTION = re.compile(rf"\\({_FUNCTIONS})(?![a-zA-Z])")
_ROUNDING = re.compile(r"\\[lr](?:floor|ceil)")
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_DIGITS = re.compile(r"\d+")
_EXPONENT = re.compile(r"\^\s?(?:\{([^{}^]*)\}|(\\?[a-zA-Z]+|\d))")
_SYMBOL = re.compile(r"\\(?!cdot|times|div)[a-zA-Z]+|[a-zA-Z]")
_ROOT_INDEX = re.compile(r"\\sqrt\s?\[(?!\d{1,2}\]|[a-z]\])")
_CHAIN = re.compile(r"[\^_]\s?(?:\{[^{}]*\}|\\?[a-zA-Z]+|\d)\s?[\^_]")
_CHOSEN = r"\{(?:\d|\d?[a-zA-Z](?:[+-]\d)?)\}"
_BINOMIAL = re.compile(rf"\\binom(?:\{{\d{{1,3}}\}}\{{\d{{1,3}}\}}|{_CHOSEN}{_CHOSEN})")
_FACTORIAL = re.compile(r"(?<![\d.)}\]!])\d{1,3}!(?!\s*[!^])")
_ALLOWED = re.compile(r"[\w\s\\{}()\[\]|,.;:'+\-*/^=<>!&]*")
_LETTERS = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{[^{}]*\}|\\[a-zA-Z]+|([a-zA-Z])")


def admitted(text: str) -> bool:
    """Return True if a normalised answer may be parsed: it is short, has only known commands, and is cheap to
    evaluate."""
    if len(text) > MAX_LENGTH or not text.isascii() or not _ALLOWED.fullmatch(text):
        return False
    commands = _COMMAND.findall(text)
    if not all(map(_COMMANDS.fullmatch, commands)):
        return False
    if ("begin" in commands or "end" in commands) and not _MATRIX.fullmatch(text):
        return False  # also products, powers and inverses of matrices
    if len(commands) + sum(map(text.count, "+-*/^=<>|!_")) > MAX_SIGNS or text.count("|") > MAX_BARS:
        return False
    if sum(map(bool, _LETTERS.findall(text))) > MAX_LETTERS or _depth(text) > MAX_DEPTH:
        return False
    return _functions(text) and _powers(text) and _factorials(text)


def _depth(text: str) -> int:
    deepest = depth = 0
    for character in text:
        if character in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "})]":
            depth -= 1
    return deepest


def _functions(text: str) -> bool:
    functions = _FUNCTION.findall(text)
    rounds = bool(_ROUNDING.search(text))
    # A rounding consists of two commands, the left and the right bracket.
    if len(functions) > (2 * MAX_FUNCTIONS if rounds else MAX_FUNCTIONS):
        return False
    if "exp" in functions and len(functions) > 1:
        return False
    if rounds and ("!" in text or r"\infty" in text):
        return False
    longest = MAX_SMALL_DIGITS if "exp" in functions or "binom" in functions else MAX_DIGITS
    if any(len(digits) > longest for digits in _DIGITS.findall(text)):
        return False
    return len(_BINOMIAL.findall(text)) == functions.count("binom")


def _powers(text: str) -> bool:
    exponents = [group or single for group, single in _EXPONENT.findall(text)]
    if len(exponents) != text.count("^") or _CHAIN.search(text) or text.count("_") + len(exponents) > MAX_SCRIPTS:
        return False  # the parser's time doubles with each exponent or index inside another
    product = 1
    for exponent in exponents:
        quotient = "/" in exponent or r"\div" in exponent
        if _FUNCTION.search(exponent) or (quotient and "." in exponent):
            return False
        for digits in _DIGITS.findall(exponent):
            product *= max(int(digits), 1)
        product *= LETTER_POWER ** len(_SYMBOL.findall(exponent))
    expands = any(_LETTERS.findall(text)) or _ROUNDING.search(text)
    return product <= (MAX_SMALL_POWER if expands else MAX_POWER) and not _ROOT_INDEX.search(text)


def _factorials(text: str) -> bool:
    # The parser reads `)_` as a falling factorial.
    return ")_" not in text and len(_FACTORIAL.findall(text)) == text.count("!")
