"""Makes text of models and environments safe for a terminal: without escape sequences and reordered letters."""

import unicodedata

KEPT = {"\n", "\t", "\u200c", "\u200d"}
"""Control and format characters that stay: line ends, tabs, and the joiners that Persian and emoji need."""
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories shown as escapes: control, format (with bidirectional overrides), surrogates, private use, line
and paragraph separators."""


def printable(text: str) -> str:
    """Return `text` with hidden characters as escapes such as `\\x1b`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character in KEPT or unicodedata.category(character) not in HIDDEN:
        return character
    return character.encode("unicode_escape").decode()
