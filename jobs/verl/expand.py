"""What the words of a bash script expand to, as far as the text of the script tells.

A value is text, or a list of texts for an array. A piece that cannot be known stands in the text as a mark (`\\ue000`,
a number, `\\ue001`), which every assignment hands on, until `shown` and `why` turn it into its source and a reason.
"""

import ast
import operator
import re
from collections.abc import Iterator, Mapping

from jobs.verl.tokens import ScriptError, Token, behind, tokens

MAX_TEXT = 1 << 16
"""Longest value that is worked out, in characters; variables that double each other would fill the memory."""

MAX_ARITHMETIC = 1000
"""Longest arithmetic that is worked out, in characters."""

Value = str | list[str]

_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^]]*)\])?(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_MARK = re.compile("\ue000([0-9]+)\ue001")
_INTEGERS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_ESCAPES = {"n": "\n", "t": "\t"}


class Expander:
    """Variables, arguments, and the expansion of words."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables: dict[str, Value] = dict(variables)
        self.doubt: int | None = None
        """Line of the undecided branch that is read; None outside."""
        self.arguments: list[str] = []
        """The arguments of the function that is read; the script itself has none."""
        self._unknown: list[tuple[str, str]] = []

    def output(self, text: str, line: int) -> str | None:
        """What a command substitution puts out; None where the text does not tell."""
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
        """Give a variable a value."""
        size = len(value) if isinstance(value, str) else sum(len(text) + 1 for text in value)
        if size > MAX_TEXT:
            value = self.unknown(f"${name}", f"is longer than {MAX_TEXT} characters in line {line}")
        if self.doubt:
            before = self.variables.get(name)
            mark = self.unknown(f"${name}", f"depends on a branch in line {self.doubt} that only a run decides")
            kept = before if isinstance(before, list) and value[: len(before)] == before else None
            value = mark if kept is None else [*kept, mark]
        self.variables[name] = value

    def assign(self, name: str, index: str, adds: bool, raw: str, line: int) -> None:
        """Carry out the assignment `name[index]=raw`, or `name+=raw`."""
        value: Value
        if name == "IFS":
            raise ScriptError(f"line {line}: words that are split at other letters than blanks (IFS) are not followed")
        if index:
            value = self.unknown(f"${name}", f"is assigned by its index in line {line}")
        elif raw.startswith("("):
            value = [field for token in tokens(raw[1:-1], line) if not token.operator for field in self.fields(token)]
        else:
            value = self.text(raw, line)
        before = self.variables.get(name)
        if adds and isinstance(value, list):
            value = [*(before if isinstance(before, list) else [before] if before else []), *value]
        elif adds and not index:
            first, *others = before if isinstance(before, list) and before else [str(before or "")]
            value = [f"{first}{value}", *others] if others else f"{first}{value}"
        self.bind(name, value, line)

    def fields(self, token: Token) -> list[str]:
        """The words that bash makes of one word."""
        if re.match(r"[^=\"'$`\\]*[*?]", token.text):
            return [self.unknown(token.text, f"in line {token.line} stands for files")]
        fields: list[str] = []
        current: str | None = None
        for value, splits in self._pieces(token.text, token.line):
            if isinstance(value, str) and not splits:
                current = (current or "") + value
                continue
            pieces = value if isinstance(value, list) else value.split()
            glued = isinstance(value, list) or not value[:1].isspace()
            for place, piece in enumerate(pieces):
                if current is not None and (place or not glued):
                    fields.append(current)
                    current = None
                current = (current or "") + piece
            if isinstance(value, str) and value[-1:].isspace() and current is not None:
                fields.append(current)
                current = None
        return fields if current is None else [*fields, current]

    def text(self, raw: str, line: int, quoted: bool = False) -> str:
        """What `raw` expands to where it is not split, as behind the `=` of an assignment."""
        pieces = (value for value, _ in self._pieces(raw, line, quoted))
        return "".join(value if isinstance(value, str) else " ".join(value) for value in pieces)

    def _pieces(self, raw: str, line: int, quoted: bool = False) -> Iterator[tuple[Value, bool]]:
        """The pieces of a word, and whether the piece is split at its blanks."""
        place = 0
        if not quoted and re.match(r"~(?=/|\Z)", raw):
            place = 1
            yield self._parameter("HOME", line, quoted), False
        while place < len(raw):
            start, place = place, behind(raw, place, quoted)
            piece = raw[start:place]
            line += raw.count("\n", start, place)
            if piece.startswith("\\"):
                plain = piece[1:] if not quoted or piece[1:] in ("$", "`", '"', "\\") else piece
                yield "" if piece == "\\\n" else plain, False
            elif piece == "$" and (name := _NAME.match(raw, place)):
                place = name.end()
                yield self._parameter(name[0], line, quoted), not quoted
            elif piece.startswith("${"):
                yield self._parameter(piece[2:-1], line, quoted), not quoted
            elif piece.startswith("$((") and piece.endswith("))"):
                yield self._arithmetic(piece[3:-2], line), not quoted
            elif piece.startswith(("$(", "`")):
                inner = piece[2:-1] if piece.startswith("$(") else re.sub(r"\\([$`\\])", r"\1", piece[1:-1])
                output = self.output(inner, line)
                value = self.unknown(piece, f"in line {line} is a command") if output is None else output
                yield value, not quoted
            elif piece.startswith(("<(", ">(")):
                yield self.unknown(piece, f"in line {line} is a command"), False
            elif piece.startswith("$'"):
                yield re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), piece[2:-1]), False
            elif len(piece) > 1 and piece.startswith("'"):
                yield piece[1:-1], False
            elif len(piece) > 1 and piece.startswith('"'):
                inner_pieces = list(self._pieces(piece[1:-1], line, quoted=True))
                yield from inner_pieces or [("", False)]
            else:
                braces = not quoted and re.match(r"\{[^{}\s]*(,|\.\.)[^{}\s]*\}", raw[start:])
                yield self.unknown(braces[0], f"in line {line} is a brace expansion") if braces else piece, False
                place = start + braces.end() if braces else place

    def _parameter(self, text: str, line: int, quoted: bool) -> Value:
        """The value of `${text}`; a list where it makes several words."""
        source = f"${text}" if _NAME.fullmatch(text) else f"${{{text}}}"
        match = _PARAMETER.fullmatch(text)
        if not match:
            return self.unknown(source, f"in line {line} is an expansion that is not worked out")
        length, name, index, rest = match.groups()
        value = self._lookup(name, index)
        if not rest and length:
            size = len(value) if isinstance(value, list) or (value and not self.why(value)) else None
            return self.unknown(source, f"in line {line} is not known") if size is None else str(size)
        if name in ("@", "*") and not self.arguments:
            return []
        if isinstance(value, list) and not quoted:
            value = [part for element in value for part in element.split()]
        elif isinstance(value, list) and "*" in (name, index):
            value = " ".join(value)
        if not rest and value is not None:
            return value
        operation = re.match(r":?[-=+?]", rest)
        if operation and not length:
            present = value is not None and (not operation[0].startswith(":") or value not in ("", []))
            if operation[0].endswith("+"):
                return self._other(rest[operation.end() :], line, quoted) if present else ""
            if present and value is not None:
                return value
            if operation[0].endswith(("-", "=")):
                other = self._other(rest[operation.end() :], line, quoted)
                if operation[0].endswith("="):
                    self.bind(name, other, line)
                return other
        elif rest:
            return self.unknown(source, f"in line {line} is an expansion that is not worked out")
        reason = "is an argument of the script" if name.isdecimal() else f"is not assigned before; give {name}=VALUE"
        return self.unknown(source, f"in line {line} {reason}")

    def _lookup(self, name: str, index: str | None) -> Value | None:
        """The value of a variable, an element or an argument; None where it has none."""
        if name == "#":
            return str(len(self.arguments))
        if name in ("@", "*"):
            return self.arguments
        if name.isdecimal():
            place = int(name[:9])
            if not place:
                return self.variables.get(name)
            return self.arguments[place - 1] if place <= len(self.arguments) else None
        value = self.variables.get(name)
        if index in ("@", "*"):
            return [value] if isinstance(value, str) else value or []
        if isinstance(value, list):
            place = int(index or 0) if (index or "0").isdecimal() else len(value)
            return value[place] if place < len(value) else None
        return value if index in (None, "0") else None

    def _other(self, text: str, line: int, quoted: bool) -> Value:
        """What stands behind the `:-` of `${X:-default}`, or behind another operator."""
        if quoted and not text.endswith(('[@]}"', "[@]}")):
            return self.text(text, line, quoted)
        return [field for token in tokens(text, line) for field in self.fields(token)]

    def _arithmetic(self, text: str, line: int) -> str:
        """The whole number that `$((text))` is."""
        plain = self.text(text, line)
        for name in sorted(set(re.findall(r"[A-Za-z_]\w*", plain)), key=len, reverse=True):
            value = self.variables.get(name, "")
            number = f"({value.strip()})" if isinstance(value, str) and value.strip() else name
            plain = number.join(re.split(rf"\b{name}\b", plain))
        if reasons := "; ".join(self.why(plain)):
            return self.unknown(f"$(({text}))", f"in line {line} cannot be computed, because {reasons}")
        try:
            if len(plain) <= MAX_ARITHMETIC:
                return str(_integer(ast.parse(plain.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            pass
        return self.unknown(f"$(({text}))", f"in line {line} is arithmetic that is not worked out")


def _integer(node: ast.expr) -> int:
    """The value of +, -, *, / and % of whole numbers, divided as bash does (towards 0).

    Raises:
        ValueError: it is something else.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_integer(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _integer(node.left), _integer(node.right)
        if type(node.op) in _INTEGERS:
            return _INTEGERS[type(node.op)](left, right)
        if isinstance(node.op, ast.Div | ast.Mod):
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return quotient if isinstance(node.op, ast.Div) else left - quotient * right
    raise ValueError("this is not plain arithmetic")
