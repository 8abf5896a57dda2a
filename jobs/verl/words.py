"""What the words of a bash script expand to, as far as its text tells. tree-sitter parses the script.

A value is text, or a list of texts for an array. A piece that cannot be known stands in the text as a mark (`\\ue000`,
a number, `\\ue001`), which assignments pass on, until `shown` and `why` turn it into its source and a reason.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

MAX_TEXT = 1 << 16
"""Longest value in characters; variables that double each other would fill the memory."""

Value = str | list[str]

_MARK = re.compile("\ue000([0-9]+)\ue001")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\$\{[^}]*\}|\$\([^)]*\)")
_FILES_OR_BRACES = re.compile(r"[^=]*[*?]|.*\{[^{}\s]*(,|\.\.)[^{}\s]*\}")
_EXPANSION = re.compile(r"\$\{?(\w+|[@*#])(\[[@*0]\])?(?:(:?[-=+?]).*)?\}?", re.DOTALL)
_MISREAD = re.compile(rb"(?<=[-=+])(\$\(\([^\"'`${}\n]*\)\))(?=\})|\$([A-Za-z_]\w*)(?=/)|(?<=/)\$([A-Za-z_]\w*)")
_GLUED = ("concatenation", "string", "expansion", "binary_expression", "heredoc_redirect", "heredoc_body")
_ESCAPES = {"n": "\n", "t": "\t"}
_EXPANSIONS = ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion")
_PLAIN = ("word", "number", "variable_name", "extglob_pattern", "regex")


class ScriptError(ValueError):
    """A script that cannot be read for certain. The message names the line."""


@functools.cache
def _bash() -> Parser:
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ImportError as error:
        raise ScriptError(
            f"reading a script needs the extra verl of slipstream-rl ({error}): pip install tree-sitter "
            "tree-sitter-bash==0.25.1"
        ) from None
    return Parser(Language(tree_sitter_bash.language()))


def source_of(node: Node) -> str:
    """What stands in the script, without the blanks that the parser takes into an expansion behind them."""
    text = (node.text or b"").decode()
    return text.lstrip() if node.type in _EXPANSIONS else text


class Words:
    """Variables, arguments, and the expansion of words."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables: dict[str, Value] = dict(variables)
        self.doubt: int | None = None
        """Line of the undecided part of the script that is read; None outside."""
        self.arguments: list[str] = []
        """The arguments of the function that is read; the script itself has none."""
        self._unknown: list[tuple[str, str]] = []
        self._first_line = 1

    def parse(self, text: str) -> Node:
        """The syntax tree of a script.

        Raises:
            ScriptError: it is not bash.
        """
        try:
            return self._checked(_bash().parse(text.encode()).root_node)
        except ScriptError:
            if (root := _mended(text.encode())) is None:
                raise
            return self._checked(root)

    def _checked(self, root: Node) -> Node:
        node = root
        while broken := [child for child in node.children if child.has_error or child.is_missing]:
            node = broken[0]
        if root.has_error:
            raise ScriptError(f"line {self.line(node)}: a quote, a bracket or a keyword has no end here or before")
        self._check(root)
        return root

    def _check(self, node: Node) -> None:
        """Refuse what the parser misreads: blanks behind a backslash, one word taken for two, and a `$` alone."""
        before: Node | None = None
        for child in node.children:
            place = before.end_byte if before else node.start_byte
            between = (node.text or b"")[place - node.start_byte : child.start_byte - node.start_byte]
            split = before and before.is_named and child.is_named and not between and node.type not in _GLUED
            split = split and not child.type.endswith("_clause")
            lone = (child.type == "$") != (node.type == "simple_expansion" and before is None)
            if split or lone or (between and node.type == "simple_expansion") or re.search(rb"\\[ \t\v\f]", between):
                raise ScriptError(f"line {self.line(child)}: {source_of(node)[:60]!r} is not followed")
            self._check(child)
            before = child

    def line(self, node: Node) -> int:
        """The line on which a node begins."""
        return self._first_line + node.start_point[0]

    def output(self, node: Node) -> str | None:
        """What a command substitution prints; None where the text does not tell."""
        raise NotImplementedError

    def unknown(self, source: str, reason: str) -> str:
        """A mark for `source`, a piece of the script whose value cannot be known; `reason` begins with a verb."""
        self._unknown.append((source, reason))
        return f"\ue000{len(self._unknown) - 1}\ue001"

    def shown(self, text: str) -> str:
        """`text` with the source of its unknown pieces in their places."""
        return _MARK.sub(lambda match: self._unknown[int(match[1])][0], text)

    def why(self, text: str) -> list[str]:
        """A clause for each unknown piece of `text`."""
        pieces = (self._unknown[int(number)] for number in _MARK.findall(text))
        return list(dict.fromkeys(f"{source} {reason}" for source, reason in pieces))

    def bind(self, name: str, value: Value, line: int) -> None:
        """Give a variable a value; in an undecided part it is unknown from then on."""
        size = len(value) if isinstance(value, str) else sum(len(text) + 1 for text in value)
        if size > MAX_TEXT:
            value = self.unknown(f"${name}", f"is longer than {MAX_TEXT} characters in line {line}")
        if self.doubt:
            mark = self.unknown(f"${name}", f"depends on line {self.doubt}, which only a run decides")
            before = self.variables.get(name)
            # An array that only grows keeps what it held before.
            grows = isinstance(before, list) and value[: len(before)] == before
            value = [*before, mark] if isinstance(before, list) and grows else mark
        self.variables[name] = value

    def assign(self, node: Node) -> None:
        """Carry out a `variable_assignment`.

        Raises:
            ScriptError: it changes how words are split.
        """
        target, sign, *rest = node.children
        name, line = source_of(target).partition("[")[0], self.line(node)
        if name == "IFS":
            raise ScriptError(f"line {line}: words that are split at other letters than blanks (IFS) are not followed")
        value: Value = ""
        if target.type == "subscript":
            value = self.unknown(f"${name}", f"is assigned by its index in line {line}")
        elif rest and rest[0].type == "array":
            value = [field for word in rest[0].named_children for field in self.fields(word)]
        elif rest:
            value = self.text(rest[0])
        before = self.variables.get(name) or ""
        if sign.type == "+=" and isinstance(value, str) and isinstance(before, str):
            value = before + value
        elif sign.type == "+=":
            held = before if isinstance(before, list) else [before] if before else []
            value = [*held, *value] if isinstance(value, list) else [f"{held[0]}{value}", *held[1:]]
        self.bind(name, value, line)

    def fields(self, node: Node) -> list[str]:
        """The words that bash makes of one word."""
        source, line = source_of(node), self.line(node)
        if node.type == "comment":
            return []
        if _FILES_OR_BRACES.match(_QUOTED.sub("", source)) and node.type not in ("string", "raw_string"):
            key, equals, words = source.partition("=")
            mark = self.unknown(words or key, f"in line {line} stands for more words")
            return [f"{key}{equals}" * bool(words) + mark]
        fields: list[str] = []
        current: str | None = None
        for value, splits in self._pieces(node):
            if isinstance(value, str) and not splits:
                current = (current or "") + value
                continue
            pieces = value if isinstance(value, list) else value.split()
            # A blank at either end of a split text ends a word; the ends of an array's elements do not.
            if isinstance(value, str) and value[:1].isspace():
                pieces = ["", *pieces]
            if isinstance(value, str) and value[-1:].isspace():
                pieces = [*pieces, ""]
            for place, piece in enumerate(pieces):
                if place and current is not None:
                    fields.append(current)
                    current = None
                if piece or isinstance(value, list):
                    current = (current or "") + piece
        return fields if current is None else [*fields, current]

    def text(self, node: Node) -> str:
        """What a word expands to where it is not split, as behind the `=` of an assignment."""
        return "".join(_joined(value) for value, _ in self._pieces(node))

    def _pieces(self, node: Node, quoted: bool = False) -> Iterator[tuple[Value, bool]]:
        """The pieces of a word, and whether the piece is split at its blanks."""
        source, where = source_of(node), f"in line {self.line(node)}"
        if node.type in _EXPANSIONS and (blanks := (node.text or b"").decode().removesuffix(source)):
            yield blanks, not quoted
        match node.type:
            case "concatenation":
                yield from self._row(node, 0, quoted)
            case "string":
                yield from self._string(node)
            case "simple_expansion" | "expansion":
                yield from self._expansion(node, quoted)
            case "command_substitution":
                output = self.output(node)
                yield self.unknown(source, f"{where} is a command") if output is None else output, not quoted
            case "arithmetic_expansion":
                yield self._arithmetic(node), False
            case "ansi_c_string":
                yield re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), source[2:-1]), False
            case "raw_string" if not quoted:
                yield source[1:-1], False
            case "raw_string" | "word" | "number" if quoted and not re.search("[$`]", source):
                yield _unescaped(source), False
            case kind if kind in _PLAIN and not quoted:
                parent = node.parent if node.parent is not None and node.parent.type == "concatenation" else node
                others = re.match("~[^/]", source_of(parent)) and parent.start_byte == node.start_byte
                if others or ":~" in source_of(parent):
                    yield self.unknown(source, f"{where} may be another folder than HOME"), False
                    return
                if re.match(r"~(/|\Z)", source_of(parent)) and parent.start_byte == node.start_byte:
                    yield self.variables.get("HOME", "~"), False
                    source = source[1:]
                plain = re.sub(r"\\(\n|.)", lambda match: match[1].strip("\n"), source)
                # Only the default of an unquoted expansion has blanks in its words.
                yield plain, re.search(r"(?<!\\)\s", source) is not None
            case _:
                yield self.unknown(source, f"{where} is an expansion that is not worked out"), False

    def _row(self, node: Node, first: int, quoted: bool) -> Iterator[tuple[Value, bool]]:
        """The pieces of the children from `first` on, and the blanks between them, for which there are no nodes."""
        place = node.children[first - 1].end_byte if first else node.start_byte
        for child in node.children[first:]:
            if blanks := (node.text or b"")[place - node.start_byte : child.start_byte - node.start_byte].decode():
                yield blanks, not quoted
            if child.type != "}":
                yield from self._pieces(child, quoted)
            place = child.end_byte

    def _string(self, node: Node) -> Iterator[tuple[Value, bool]]:
        """The pieces of `"..."`. The parser has no nodes for blanks between expansions."""
        text, place = node.text or b"", node.start_byte + 1
        if len(text) == 2:
            yield "", False
        for child in node.children[1:]:
            end = child.start_byte if child.is_named and child.type != "string_content" else child.end_byte
            plain = text[place - node.start_byte : end - node.start_byte].decode()
            if plain := plain.removesuffix('"') if not child.is_named and child.type == '"' else plain:
                yield _unescaped(plain), False
            if end < child.end_byte:
                yield from self._pieces(child, quoted=True)
            place = child.end_byte

    def _expansion(self, node: Node, quoted: bool) -> Iterator[tuple[Value, bool]]:
        """The pieces of `$NAME` or `${...}`."""
        source, where = source_of(node), f"in line {self.line(node)}"
        match = _EXPANSION.fullmatch(source)
        if re.fullmatch(r"\$\{@:[1-9]\}", source) and not self.arguments:
            yield [], not quoted
            return
        if not match:
            yield self.unknown(source, f"{where} is an expansion that is not worked out"), False
            return
        name, every, operation = match[1], (match[2] or "").removeprefix("[0]"), match[3] or ""
        value = self._lookup(name, bool(every))
        present = value is not None and (value not in ("", []) or not operation.startswith(":"))
        if (operation.endswith("+") and present) or (operation.endswith(("-", "=")) and not present):
            place = next(place for place, child in enumerate(node.children) if child.type == operation)
            others = list(self._row(node, place + 1, quoted))
            if operation.endswith("="):
                self.bind(name, "".join(_joined(piece) for piece, _ in others), self.line(node))
            yield from others
        elif not present and operation in ("", "?", ":?"):
            reason = (
                "is an argument of the script" if name.isdecimal() else f"is not assigned before; give {name}=VALUE"
            )
            yield self.unknown(source, f"{where} {reason}"), False
        elif value is not None and not operation.endswith("+"):
            if isinstance(value, list) and not quoted:
                value = [part for element in value for part in element.split()]
            elif isinstance(value, list) and "*" in (name, every.strip("[]")):
                value = " ".join(value)
            yield value, not quoted

    def _lookup(self, name: str, every: bool) -> Value | None:
        """The value of a variable, or of an argument; None where it has none. An array gives its first element."""
        if name == "#":
            return str(len(self.arguments))
        if name in ("@", "*"):
            return self.arguments
        if name.isdecimal() and int(name[:9]):
            return self.arguments[int(name[:9]) - 1] if int(name[:9]) <= len(self.arguments) else None
        value = self.variables.get(name)
        if every:
            return [value] if isinstance(value, str) else value or []
        if isinstance(value, list):
            return value[0] if value else None
        return value

    def _arithmetic(self, node: Node) -> str:
        """The whole number that `$((...))` is."""
        try:
            return str(self._integer(node.named_children[0]))
        except (ValueError, ZeroDivisionError, IndexError, RecursionError) as error:
            return self.unknown(source_of(node), f"in line {self.line(node)} is not worked out: {error}")

    def _integer(self, node: Node) -> int:
        """The value of +, -, *, / and % of whole numbers, divided as bash does (towards 0).

        Raises:
            ValueError: it is something else, or not known.
        """
        text = source_of(node)
        match node.type, [child.type for child in node.children]:
            case "parenthesized_expression", ["(", _, ")"]:
                return self._integer(node.children[1])
            case "binary_expression", [_, "+" | "-" | "*" | "/" | "%" as operator, _]:
                left, right = self._integer(node.children[0]), self._integer(node.children[2])
                if operator in "+-*":
                    return {"+": left + right, "-": left - right, "*": left * right}[operator]
                quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
                return quotient if operator == "/" else left - quotient * right
            case "variable_name" | "word", _ if text.isidentifier():
                text = _joined(self._lookup(text, False) or text)
            case "simple_expansion" | "expansion", _:
                text = self.text(node)
        if not re.fullmatch(r"-?(0|[1-9]\d{0,17})", text.strip()):
            raise ValueError("; ".join(self.why(text)) or f"{text[:80]!r} is not plain arithmetic")
        return int(text)


def _joined(value: Value) -> str:
    return value if isinstance(value, str) else " ".join(value)


def _unescaped(source: str) -> str:
    """The text of a piece of `"..."`."""
    return re.sub(r"\\([$`\"\\\n])", lambda match: match[1].strip("\n"), source)


def _mended(text: bytes) -> Node | None:
    """The tree of `text` in forms that the parser does not misread, where they mean the same; else None.

    It misreads arithmetic with brackets in a default, as in `${A:-$(((B + C) * 2))}`, and `A=$B/$C/$D`.
    """
    new = _MISREAD.sub(lambda match: b'"%b"' % match[1] if match[1] else b"${%b}" % (match[2] or match[3]), text)
    root = _bash().parse(new).root_node
    for count, match in enumerate(_MISREAD.finditer(text)):
        place = match.start() + 2 * count
        node = root.descendant_for_byte_range(place, place + 1)
        # In quotes and the like, what is added would be a part of the text.
        if not node or node.type not in ('"', "${", "comment") or (node.type == '"' and not node.next_sibling):
            return None
    return root


def file_name(name: str, arguments: list[str]) -> str | None:
    """What `basename` or `dirname` prints, without the line's end; None where that is not worked out."""
    path = arguments[0].rstrip("/") if 1 <= len(arguments) <= 1 + (name == "basename") else ""
    if not path or path.startswith("-"):
        return None
    folder, slash, last = path.rpartition("/")
    if name == "dirname":
        return (folder.rstrip("/") or "/") if slash else "."
    suffix = arguments[1] if arguments[1:] and arguments[1] != last else ""
    return last.removesuffix(suffix)
