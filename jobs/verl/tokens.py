"""Splits a bash script into words and operators. Nothing is expanded, and nothing is run.

A word keeps its quotes and expansions as they stand in the script. Comments, redirections and here-documents are left
out, because they hold no setting.
"""

import re
from dataclasses import dataclass

_BLANKS = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|>>|<>|>\||[<>]&|[<>](?!\())|&>>?")
_OPERATOR = re.compile(r";;&|;;|;&|&&|\|\||\|&|[;&|()\n]")
_PLAIN = re.compile(r"[\w./:,@%+=~!*?^-]+")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_CLOSING = {"$(": ")", "${": "}", "$'": "'", "<(": ")", ">(": ")", "'": "'", '"': '"', "`": "`"}
_WORD_END = " \t\r\n;&|()<>"


class ScriptError(ValueError):
    """A script that cannot be read for certain. The message names the file and the line."""


@dataclass(frozen=True)
class Token:
    """A word as it stands in the script, or an operator such as `&&` or a line end."""

    text: str
    line: int
    operator: bool = False


def tokens(text: str, line: int = 1) -> list[Token]:
    """The words and operators of a script whose first line has the number `line`.

    Raises:
        ScriptError: a quote or bracket is never closed.
    """
    result: list[Token] = []
    documents: list[tuple[str, bool]] = []
    place = counted = 0
    in_test = False
    while place < len(text):
        line += text.count("\n", counted, place)
        counted = start = place
        try:
            if blanks := _BLANKS.match(text, place):
                place = blanks.end()
            elif text[place] == "#":
                place = _line_end(text, place)
            elif in_test and text[place] in "<>":
                place += 1
                result.append(Token(text[start], line, operator=True))
            elif redirection := _REDIRECTION.match(text, place):
                blanks = _BLANKS.match(text, redirection.end())
                start = blanks.end() if blanks else redirection.end()
                place = _word_end(text, start)
                if "<<" in redirection[0] and "<<<" not in redirection[0]:
                    documents.append((re.sub(r"[\"'\\]", "", text[start:place]), "-" in redirection[0]))
            elif text.startswith("((", place) and text[_closed(text, place + 1, ")") - 2] == ")":
                place = _closed(text, place + 1, ")")
                result.append(Token(text[start:place], line))
            elif operator := _OPERATOR.match(text, place):
                place = operator.end()
                if operator[0] == "\n":
                    place = _behind_documents(text, place, documents)
                    documents = []
                result.append(Token(operator[0], line, operator=True))
            else:
                place = max(_word_end(text, place), place + 1)
                result.append(Token(text[start:place], line))
                in_test = result[-1].text == "[[" or (in_test and result[-1].text != "]]")
        except ScriptError as error:
            raise ScriptError(f"line {line}: {error}") from None
    return result


def behind(text: str, place: int, quoted: bool = False) -> int:
    """The place behind the quote, expansion, escape or piece of plain text that begins at `place`.

    Args:
        quoted: whether double quotes surround the text; single quotes and `<(` are then plain text.
    """
    if text[place] == "\\":
        return min(place + 2, len(text))
    for opening, closing in _CLOSING.items():
        if text.startswith(opening, place) and not (quoted and opening in ("'", "$'", "<(", ">(")):
            return _closed(text, place + len(opening), closing, quoted, escapes=opening != "'")
    plain = _PLAIN.match(text, place)
    return plain.end() if plain else place + 1


def _closed(text: str, place: int, closing: str, quoted: bool = False, escapes: bool = True) -> int:
    """The place behind the `closing` that ends the bracket or quote opened just before `place`."""
    start = place
    while place < len(text):
        if text[place] == closing:
            return place + 1
        if closing == "'":
            place += 2 if escapes and text[place] == "\\" else 1
        elif closing == ")" and text[place] == "(":
            place = _closed(text, place + 1, ")")
        elif closing == ")" and text[place] == "#" and text[place - 1] in " \t\n(":
            place = _line_end(text, place)
        elif text[place] in "'\"`\\$<>":
            place = behind(text, place, closing == '"' or (quoted and closing == "}"))
        else:
            place += 1
    raise ScriptError(f"the {closing} of {text[max(0, start - 2) : start + 20].splitlines()[0]!r} is missing")


def _word_end(text: str, place: int) -> int:
    start = place
    if text.startswith(("<(", ">("), place):
        place = behind(text, place)
    while place < len(text):
        if text[place] == "(" and _ARRAY.fullmatch(text, start, place):
            return _closed(text, place + 1, ")")
        if text[place] in _WORD_END:
            break
        place = behind(text, place)
    return place


def _line_end(text: str, place: int) -> int:
    end = text.find("\n", place)
    return len(text) if end < 0 else end


def _behind_documents(text: str, place: int, documents: list[tuple[str, bool]]) -> int:
    """The place behind the here-documents that begin at `place`."""
    for delimiter, indented in documents:
        while place < len(text):
            end = _line_end(text, place)
            line = text[place:end]
            place = end + 1
            if (line.lstrip("\t") if indented else line) == delimiter:
                break
    return min(place, len(text))
