"""The variables of a bash script and what its words expand to, as far as the text alone tells.

A value is a string, or a list of strings for an array. A piece of it that cannot be known stands in the string as a
mark, `\\ue000` and its number and `\\ue001`, which survives every assignment and split until `shown` and `why` turn it
into its source text and a reason.
"""

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jobs.verl.words import Part, Reader, Word

MAX_TEXT = 1 << 16
"""Longest value that is worked out, in characters; variables that double each other would fill the memory."""

MAX_ARITHMETIC = 1000
"""Longest arithmetic that is worked out, in characters."""

Path = tuple[int, ...]
"""Numbers of the branches, loops and functions around a command, from the outermost."""

MARKS = {0xE000: None, 0xE001: None}
"""Translation that takes the characters of a mark out of a script."""

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*])(?:\[([^]]*)\])?(.*)", re.DOTALL)
_MARK = re.compile("\ue000([0-9]+)\ue001")
_ENVIRONMENT = ("HOME", "PWD")
_NOT_WORKED_OUT = "is an expansion that is not worked out"
_INTEGERS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@dataclass(frozen=True)
class _Binding:
    value: str | list[str]
    line: int
    source: str
    path: Path
    cautions: tuple[str, ...]


class Values:
    """The variables that the script has assigned so far."""

    def __init__(self) -> None:
        self.source = ""
        """Name of the script that is read."""
        self.path: Path = ()
        """Where the command stands that is read."""
        self.cautions: list[str] = []
        """Assignments that may or may not come before what was expanded since the list was emptied."""
        self._bindings: dict[str, list[_Binding]] = {}
        self._unknown: list[tuple[str, str]] = []

    def unknown(self, text: str, reason: str) -> str:
        """A mark for `text`, a piece of the script whose value cannot be known; `reason` begins with a verb."""
        self._unknown.append((text, reason))
        return f"\ue000{len(self._unknown) - 1}\ue001"

    def shown(self, text: str) -> str:
        """`text` with the source of its unknown pieces in their places."""
        return _MARK.sub(lambda match: self._unknown[int(match[1])][0], text)

    def why(self, text: str) -> Iterator[str]:
        """A clause for each unknown piece of `text`."""
        for number in _MARK.findall(text):
            source, reason = self._unknown[int(number)]
            yield f"{source} {reason}" if "`" in source else f"`{source}` {reason}"

    def bind(self, name: str, value: str | list[str], line: int) -> None:
        """Give a variable a value from here on."""
        size = len(value) if isinstance(value, str) else sum(len(text) + 1 for text in value)
        if size > MAX_TEXT:
            value = self.unknown(f"${name}", f"is longer than {MAX_TEXT} characters in line {line}")
        binding = _Binding(value, line, self.source, self.path, tuple(dict.fromkeys(self.cautions)))
        self._bindings.setdefault(name, []).append(binding)
        self.cautions = []

    def assign(self, word: Word) -> None:
        """Carry out an assignment; `assigns(word)` holds."""
        match = _ASSIGNMENT.fullmatch(word.parts[0].text)
        assert match is not None
        name, index, adds, text = match.groups()
        value: str | list[str]
        if index:
            value = self.unknown(f"${{{name}{index}}}", f"is assigned by its index in line {word.line}")
        elif word.elements is not None:
            value = [field for element in word.elements for field in self.fields(element)]
        else:
            # The shell expands `~` here, and only here.
            text = re.sub(r"\A~(?=/|\Z)", "${oc.env:HOME}", text)
            value = text + "".join(self._text(part, word.line) for part in word.parts[1:])
        if adds and not index:
            value = self._added(name, value)
        self.bind(name, value, word.line)

    def _added(self, name: str, value: str | list[str]) -> str | list[str]:
        old = self.lookup(name)
        if isinstance(value, list):
            return [*(old if isinstance(old, list) else [] if old is None else [old]), *value]
        return [(old[0] if old else "") + value, *old[1:]] if isinstance(old, list) else (old or "") + value

    def lookup(self, name: str) -> str | list[str] | None:
        """The value of a variable here; None where nothing assigns it."""
        passed: list[int] = []
        for binding in reversed(self._bindings.get(name, [])):
            if self.path[: len(binding.path)] == binding.path:
                self.cautions += binding.cautions
                if passed:
                    self.cautions.append(
                        f"`${name}` is what line {binding.line} of {binding.source} gives it; {_listed(passed)} may "
                        "give it another value, under a condition that only the shell can decide"
                    )
                return binding.value
            passed.append(binding.line)
        if passed:
            return self.unknown(f"${name}", f"is assigned under a condition ({_listed(passed)})")
        return f"${{oc.env:{name}}}" if name in _ENVIRONMENT else None

    def fields(self, word: Word, split_text: bool = False) -> list[str]:
        """The words that bash makes of one word; with `split_text` unquoted text is split, too, as that of a default
        value is."""
        fields: list[str] = []
        current: str | None = None
        for part in word.parts:
            value = self._value(part, word.line)
            if isinstance(value, str) and (part.quoted or (part.kind == "text" and not split_text)):
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
        # Quotes around nothing but an empty array make no word.
        empty = current == "" and any(part.kind == "variable" for part in word.parts)
        return fields if current is None or empty else [*fields, current]

    def _text(self, part: Part, line: int) -> str:
        value = self._value(part, line)
        return value if isinstance(value, str) else " ".join(value)

    def _value(self, part: Part, line: int) -> str | list[str]:
        if part.kind == "text":
            return part.text
        if part.kind == "command":
            return self.unknown(part.text, f"in line {line} is a command")
        if part.kind == "arithmetic":
            return self._arithmetic(part.text, line)
        return self._parameter(part.text, line, part.quoted)

    def _parameter(self, text: str, line: int, quoted: bool) -> str | list[str]:
        """The value of `${text}`; a list where it makes several words."""
        shown = f"${text}" if text.isidentifier() or len(text) == 1 else f"${{{text}}}"
        match = _PARAMETER.fullmatch(text)
        if not match:
            return self.unknown(shown, f"in line {line} {_NOT_WORKED_OUT}")
        name, index, rest = match.groups()
        if name in ("@", "*"):
            # The script's own arguments: none are given here.
            return []
        value = self.lookup(name) if name.isidentifier() else None
        if index in ("@", "*"):
            value = [value] if isinstance(value, str) else value
        elif isinstance(value, list):
            place = int(index or 0) if (index or "0").isdecimal() else len(value)
            value = value[place] if place < len(value) else None
        elif index not in (None, "0"):
            return self.unknown(shown, f"in line {line} {_NOT_WORKED_OUT}")
        if not rest and value is not None:
            return value
        if not rest:
            reason = "is an argument of the script" if name.isdecimal() else f"is not assigned in {self.source}"
            return self.unknown(shown, f"in line {line} {reason}")
        match = re.match(r":?[-=+?]", rest)
        if not match:
            return self.unknown(shown, f"in line {line} {_NOT_WORKED_OUT}")
        operation, other = match[0], rest[match.end() :]
        there = value is not None and (not operation.startswith(":") or value not in ("", []))
        if operation.endswith("+"):
            return self._other(other, line, quoted) if there else ""
        if there and value is not None:
            return value
        if operation.endswith("?"):
            return self.unknown(shown, f"in line {line} is not assigned in {self.source}")
        return self._other(other, line, quoted)

    def _other(self, text: str, line: int, quoted: bool) -> str | list[str]:
        """What stands behind the `:-` of `${X:-default}`, or behind another operator."""
        word = Reader(text, line).whole(quoted)
        if not quoted or any(part.kind == "variable" and part.text.endswith(("[@]", "[*]")) for part in word.parts):
            return self.fields(word, split_text=not quoted)
        return "".join(self._text(part, line) for part in word.parts)

    def _arithmetic(self, text: str, line: int) -> str:
        """The whole number that `$((text))` is."""
        shown = f"$(({text}))"
        plain = "".join(self._text(part, line) for part in Reader(text, line).whole().parts)
        for name in sorted(set(re.findall(r"[A-Za-z_]\w*", plain))):
            value = self.lookup(name)
            if isinstance(value, str) and re.fullmatch(r"\s*-?(0|[1-9][0-9]{0,30})\s*", value):
                plain = re.sub(rf"\b{name}\b", f"({value.strip()})", plain)
                continue
            known = "; ".join(self.why(value)) if isinstance(value, str) else ""
            reason = known or f"`${name}` is no whole number that is known"
            return self.unknown(shown, f"in line {line} cannot be computed: {reason}")
        if reasons := "; ".join(self.why(plain)):
            return self.unknown(shown, f"in line {line} cannot be computed: {reasons}")
        try:
            if len(plain) <= MAX_ARITHMETIC:
                return str(_integer(ast.parse(plain.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            pass
        return self.unknown(shown, f"in line {line} is arithmetic that is not worked out")


def assigns(word: Word) -> bool:
    """Whether the word is an assignment where one may stand."""
    first = word.parts[0] if word.parts else None
    return first is not None and first.kind == "text" and not first.quoted and bool(_ASSIGNMENT.fullmatch(first.text))


def _integer(node: ast.expr) -> int:
    """The value of +, -, *, / and % of whole numbers, divided as bash does (towards 0)."""
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
    raise ValueError("not plain arithmetic")


def _listed(lines: list[int]) -> str:
    """`line 3`, or `lines 3 and 7`."""
    ordered = [str(line) for line in sorted(set(lines))]
    return f"line {ordered[0]}" if len(ordered) == 1 else f"lines {', '.join(ordered[:-1])} and {ordered[-1]}"
