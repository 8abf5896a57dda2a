r"""What may go into the LaTeX parser and the computer algebra behind it: small answers of known commands.

The parser's time doubles with each bracket or index inside another, and algebra computes `9^{9^9}` if it is told to, so
length, nesting, powers and factorials are bounded by reading the text alone, in linear time.
"""

import re

MAX_LENGTH = 300  # characters of a tidied answer that is parsed
MAX_DEPTH = 4  # brackets inside each other
MAX_DIGITS = 30  # of one number
MAX_POWER = 1000  # product of all numbers in exponents; `MAX_SYMBOLIC_POWER` where there are letters
MAX_SYMBOLIC_POWER = 60
MAX_SIGNS = 40  # operators, of all kinds
MAX_SCRIPTS = 8  # exponents and indices
MAX_LETTERS = 20  # outside commands
MAX_FUNCTIONS = 2  # logarithms, sines and the like

COMMANDS = re.compile(
    r"frac|sqrt|binom|cdot|times|div|pm|mp|lt|gt|leq?|geq?|neq?|in|cup|cap|setminus|emptyset|varnothing|infty|mathbb|"
    r"text|textbf|mathrm|mathbf|begin|end|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|[lr]floor|[lr]ceil|"
    r"pi|alpha|beta|gamma|delta|theta|lambda|mu|rho|sigma|phi|omega"
)
MATRICES = re.compile(r"[pbv]?matrix|array")

_FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|ln|exp)(?![a-zA-Z])")
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{([a-zA-Z]*)\}")
_DIGITS = re.compile(r"\d+")
_EXPONENT = re.compile(r"\^\s?(?:\{([^{}^]*)\}|(\\?[a-zA-Z]+|\d))")
_CHAIN = re.compile(r"[\^_]\s?(?:\{[^{}]*\}|\\?[a-zA-Z]+|\d)\s?[\^_]")
_FACTORIAL = re.compile(r"(?<![\d.)}\]!])\d{1,3}!(?!\s*[!^])")
_ALLOWED = re.compile(r"[\w\s\\{}()\[\]|,.;:'+\-*/^=<>!&]*")
_LETTERS = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{[^{}]*\}|\\[a-zA-Z]+|([a-zA-Z])")


def admitted(text: str) -> bool:
    """Whether a tidied answer may be parsed: of bounded size, known commands only, and no power that explodes."""
    if len(text) > MAX_LENGTH or not text.isascii() or not _ALLOWED.fullmatch(text):
        return False
    if any(not COMMANDS.fullmatch(name) for name in _COMMAND.findall(text)):
        return False
    if any(not MATRICES.fullmatch(name) for name in _ENVIRONMENT.findall(text)):
        return False
    if any(len(digits) > MAX_DIGITS for digits in _DIGITS.findall(text)):
        return False
    if sum(map(text.count, "+-*/^=<>|!_")) + len(_COMMAND.findall(text)) > MAX_SIGNS or text.count("|") > 4:
        return False
    if sum(map(bool, _LETTERS.findall(text))) > MAX_LETTERS or len(_FUNCTION.findall(text)) > MAX_FUNCTIONS:
        return False
    return _depth(text) <= MAX_DEPTH and _powers(text) and _factorials(text)


def _depth(text: str) -> int:
    deepest = depth = 0
    for character in text:
        if character in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "})]":
            depth -= 1
    return deepest


def _powers(text: str) -> bool:
    exponents = _EXPONENT.findall(text)
    if len(exponents) != text.count("^") or _CHAIN.search(text) or text.count("_") + len(exponents) > MAX_SCRIPTS:
        return False  # the parser's time doubles with each exponent or index inside another
    product = 1
    for group, single in exponents:
        for digits in _DIGITS.findall(group or single):
            product *= max(int(digits), 1)
    return product <= (MAX_SYMBOLIC_POWER if any(_LETTERS.findall(text)) else MAX_POWER)


def _factorials(text: str) -> bool:
    if ")_" in text:
        return False  # read as falling factorials
    if r"\binom" in text and any(len(digits) > 3 for digits in _DIGITS.findall(text)):
        return False
    return len(_FACTORIAL.findall(text)) == text.count("!")
