"""The words and operators of a bash script, as text: nothing is expanded here and nothing is ever run.

Quotes, backslashes, comments, line continuations, here-documents and redirections are dealt with as bash does, so that
what is left is words, made of literal text and expansions, and the operators between them. Redirections and
here-documents are left out, for no setting stands in them.
"""

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

_BLANKS = re.compile(r"(?:[ \t]|\\\n)+")
_REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|>>|<>|>\||[<>]&|[<>](?!\())|&>>?")
_OPERATOR = re.compile(r";;&|;;|;&|&&|\|\||\|&|[;&|()\n]")
_TEXT = re.compile(r"[^\s;&|()<>'\"\\$`]+")
_QUOTED_TEXT = re.compile(r'[^"\\$`]+')
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


class ScriptError(ValueError):
    """A script that is not bash as far as it is understood here; the message says where."""


@dataclass(frozen=True)
class Part:
    """A piece of a word."""

    kind: Literal["text", "variable", "arithmetic", "command"]
    text: str
    """The text itself, what stands in `${...}`, what stands in `$((...))`, or the whole of `$(...)`."""
    quoted: bool = False


@dataclass(frozen=True)
class Word:
    """A word of the script."""

    parts: tuple[Part, ...]
    line: int
    elements: "tuple[Word, ...] | None" = None
    """Of `NAME=( ... )`: the words in the brackets."""

    @property
    def plain(self) -> str | None:
        """The text of a word without quotes and expansions, in which keywords are looked for; else None."""
        if self.elements is not None or any(part.quoted or part.kind != "text" for part in self.parts):
            return None
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True)
class Operator:
    """What stands between commands: `;`, a line end, `&&`, `|`, brackets and their like."""

    text: str
    line: int


class Reader:
    """Reads a script, or the text of an expansion, from its beginning."""

    def __init__(self, text: str, line: int = 1) -> None:
        """
        Args:
            text: of the script.
            line: number of its first line.
        """
        self.text = text
        self.first = line
        self.place = 0
        self._ends = [match.start() for match in re.finditer("\n", text)]
        self._documents: list[tuple[str, bool]] = []
        self._in_quotes = False

    def tokens(self) -> Iterator[Word | Operator]:
        """Words and operators in order.

        Raises:
            ScriptError: a quote or bracket is never closed.
        """
        while True:
            if blanks := _BLANKS.match(self.text, self.place):
                self.place = blanks.end()
            if self.place >= len(self.text):
                return
            if self.text[self.place] == "#":
                line_end = self.text.find("\n", self.place)
                self.place = len(self.text) if line_end < 0 else line_end
            elif redirection := _REDIRECTION.match(self.text, self.place):
                self._redirection(redirection)
            elif self.text.startswith("((", self.place) and (
                end := self._behind_arithmetic(self.place + 2, self.place)
            ):
                start, self.place = self.place, end
                yield Word((Part("arithmetic", self.text[start + 2 : end - 2]),), self._line(start))
            elif operator := _OPERATOR.match(self.text, self.place):
                line = self._line(self.place)
                self.place = operator.end()
                if operator.group() == "\n":
                    self._skip_documents()
                yield Operator(operator.group(), line)
            else:
                yield self._word()

    def whole(self, quoted: bool = False) -> Word:
        """All of the text as one word, blanks included, in which quotes and expansions count; inside of double quotes
        (`quoted`) single ones are text. Raises as `tokens`."""
        parts: list[Part] = []
        self._in_quotes = quoted
        while self.place < len(self.text):
            before = self.place
            self._part(parts)
            if self.place == before:
                parts.append(Part("text", self.text[before]))
                self.place += 1
        return Word(tuple(parts), self.first)

    def _line(self, place: int) -> int:
        return self.first + bisect.bisect_left(self._ends, place)

    def _word(self) -> Word:
        start, parts = self.place, list[Part]()
        while self.place < len(self.text):
            before = self.place
            self._part(parts)
            if self.place == before:
                break
            if self.text.startswith("(", self.place) and _ARRAY.fullmatch(self.text, start, self.place):
                return Word(tuple(parts), self._line(start), self._elements())
        if self.place == start:
            # A character that begins no word, such as a lone `<` of a process substitution.
            self.place += 1
            parts.append(Part("text", self.text[start]))
        return Word(tuple(parts), self._line(start))

    def _elements(self) -> tuple[Word, ...]:
        start = self.place
        self.place += 1
        words = []
        for token in self.tokens():
            if isinstance(token, Word):
                words.append(token)
            elif token.text == ")":
                return tuple(words)
        raise self._open(start, "bracket")

    def _part(self, parts: list[Part]) -> None:
        """Append the unquoted or quoted piece at `place`, if a word can go on there."""
        text, start = self.text, self.place
        if literal := _TEXT.match(text, start):
            self.place = literal.end()
            parts.append(Part("text", literal.group()))
        elif text.startswith("'", start) and not self._in_quotes:
            self.place = self._behind_quote(start)
            parts.append(Part("text", text[start + 1 : self.place - 1], quoted=True))
        elif text.startswith('"', start):
            self._double_quoted(parts, start)
        elif text.startswith("$'", start) and not self._in_quotes:
            self._escaped(parts, start)
        elif text.startswith('$"', start):
            self._double_quoted(parts, start + 1)
        elif text.startswith("\\", start):
            self.place = min(start + 2, len(text))
            if text[start + 1 : start + 2] != "\n":
                parts.append(Part("text", text[start + 1 : self.place], quoted=True))
        elif text.startswith(("<(", ">("), start):
            self.place = self._behind(start + 2, ")", start)
            parts.append(Part("command", text[start : self.place]))
        elif text[start : start + 1] in ("$", "`"):
            self._expansion(parts, quoted=False)

    def _double_quoted(self, parts: list[Part], start: int) -> None:
        self.place = start + 1
        # Empty quotes make an empty word.
        parts.append(Part("text", "", quoted=True))
        while self.place < len(self.text):
            here = self.text[self.place]
            if here == '"':
                self.place += 1
                return
            if literal := _QUOTED_TEXT.match(self.text, self.place):
                self.place = literal.end()
                parts.append(Part("text", literal.group(), quoted=True))
            elif here == "\\":
                following = self.text[self.place + 1 : self.place + 2]
                if following != "\n":
                    parts.append(Part("text", following if following in '$`"\\' else "\\" + following, quoted=True))
                self.place += 2
            else:
                self._expansion(parts, quoted=True)
        raise self._open(start, "double quote")

    def _escaped(self, parts: list[Part], start: int) -> None:
        found, place = "", start + 2
        while place < len(self.text) and self.text[place] != "'":
            if self.text[place] == "\\":
                place += 1
                following = self.text[place : place + 1]
                found += _ESCAPES.get(following, "\\" + following)
            else:
                found += self.text[place]
            place += 1
        if place >= len(self.text):
            raise self._open(start, "single quote")
        self.place = place + 1
        parts.append(Part("text", found, quoted=True))

    def _expansion(self, parts: list[Part], quoted: bool) -> None:
        """What begins with `$` or a backquote at `place`."""
        text, start = self.text, self.place
        if text.startswith("`", start):
            close = start + 1
            while close < len(text) and text[close] != "`":
                close += 2 if text[close] == "\\" else 1
            if close >= len(text):
                raise self._open(start, "backquote")
            self.place = close + 1
            parts.append(Part("command", text[start : self.place], quoted))
        elif text.startswith("$((", start) and (end := self._behind_arithmetic(start + 3, start)):
            self.place = end
            parts.append(Part("arithmetic", text[start + 3 : end - 2], quoted))
        elif text.startswith("$(", start):
            self.place = self._behind(start + 2, ")", start)
            parts.append(Part("command", text[start : self.place], quoted))
        elif text.startswith("${", start):
            self.place = self._behind(start + 2, "}", start, quoted)
            parts.append(Part("variable", text[start + 2 : self.place - 1], quoted))
        elif name := _NAME.match(text, start + 1):
            self.place = name.end()
            parts.append(Part("variable", name.group(), quoted))
        else:
            self.place = start + 1
            parts.append(Part("text", "$", quoted))

    def _behind_arithmetic(self, place: int, start: int) -> int | None:
        """The place behind `))`; None where the second bracket was that of a subshell."""
        end = self._behind(place, ")", start)
        return end + 1 if self.text.startswith(")", end) else None

    def _behind(self, place: int, close: str, start: int, quoted: bool = False) -> int:
        """The place behind the `close` that ends what begins at `start`, quotes and inner brackets skipped."""
        text = self.text
        while place < len(text):
            here = text[place]
            if here == close:
                return place + 1
            if here == "\\":
                place += 2
            elif here == "'" and not quoted:
                place = self._behind_quote(place)
            elif here == '"':
                self._double_quoted([], place)
                place = self.place
            elif text.startswith("$(", place) or (here == "(" and close == ")"):
                place = self._behind(place + (2 if here == "$" else 1), ")", place)
            elif text.startswith("${", place):
                place = self._behind(place + 2, "}", place, quoted)
            else:
                place += 1
        raise self._open(start, "bracket")

    def _behind_quote(self, start: int) -> int:
        end = self.text.find("'", start + 1)
        if end < 0:
            raise self._open(start, "single quote")
        return end + 1

    def _open(self, start: int, what: str) -> ScriptError:
        return ScriptError(f"line {self._line(start)}: the {what} that opens here is never closed")

    def _redirection(self, match: re.Match[str]) -> None:
        self.place = match.end()
        if blanks := _BLANKS.match(self.text, self.place):
            self.place = blanks.end()
        operator = match.group().lstrip("0123456789")
        if self.place < len(self.text) and not _OPERATOR.match(self.text, self.place):
            target = self._word()
            if operator in ("<<", "<<-"):
                self._documents.append(("".join(part.text for part in target.parts), operator == "<<-"))

    def _skip_documents(self) -> None:
        """Go behind the here-documents that begin after this line end."""
        for delimiter, indented in self._documents:
            while self.place < len(self.text):
                end = self.text.find("\n", self.place)
                line = self.text[self.place : end if end >= 0 else len(self.text)]
                self.place = end + 1 if end >= 0 else len(self.text)
                if (line.lstrip("\t") if indented else line) == delimiter:
                    break
        self._documents = []
