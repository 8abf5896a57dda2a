"""The commands that a bash script would start, worked out from its text. Nothing is run, and no file is sourced.

1. Assignments, arrays, defaults, arithmetic, functions, `if`, `case`, `&&` and `||` on known values, and `for` over
   known words are followed as bash does, in an environment that holds HOME, PWD and the variables that the caller
   names. Others count as not set.
2. Everything else is undecided: other loops, the output of most commands, the files of the machine. A variable that is
   assigned in an undecided part is unknown from then on, and a command there that trains is refused later.
3. Slipstream runs on NVIDIA GPUs and CPUs, so `python3 -c 'import torch_npu'` fails.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from jobs.verl.status import COMPARISONS, Status, both, either, opposite
from jobs.verl.words import ScriptError, Words, file_name, source_of

if TYPE_CHECKING:
    from tree_sitter import Node

_IGNORED = ("set", "shopt", "ulimit", "wait", "sleep", "trap", "mkdir", ":", "true", "exec")
_READERS = ("read", "mapfile", "readarray", "getopts", "let", "unset")
_STOPS = re.compile(r"\b(break|continue)\b")
MAX_ROUNDS = 1000
"""Most rounds of all loops together that are followed."""
_NEVER = {"while": False, "until": True}
_KEYWORDS = ("do_group", "then", "elif_clause", "else_clause", "fi")


@dataclass(frozen=True)
class Command:
    """A program that the script starts."""

    arguments: list[str]
    line: int
    doubt: int | None = None
    """Line of the part of the script that decides whether the command is reached, where the text does not tell."""


class _Ended(Exception):
    """The script, or with `return` its function, ends here."""


class Script(Words):
    """Follows scripts one after the other, as if they were one."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """
        Args:
            variables: the environment.
        """
        super().__init__(variables)
        self.commands: list[Command] = []
        self.notes: list[str] = []
        self._functions: dict[str, Node] = {}
        self._output: list[str] = []
        self._local: list[str] | None = None
        """Variables that the function that is read declares for itself; None outside of functions."""
        self._folders: list[str] = []
        """Folders that exist: that in which the script is started, and its own."""
        self._rounds = 0

    def read(self, text: str, path: str = "run.sh") -> None:
        """Follow a script, whose file is `path`.

        Raises:
            ScriptError: it is not bash, or it does something that is not followed here.
        """
        self.variables |= {"0": path, "BASH_SOURCE": path}
        here = self.variables.get("PWD")
        if isinstance(here, str) and here.startswith("/") and not self.why(here):
            self._folders = [here, os.path.dirname(os.path.normpath(os.path.join(here, path)))]
        try:
            self._run(self.parse(re.sub("[\ue000\ue001]", "", text.replace("\r\n", "\n"))))
        except _Ended:
            pass
        except RecursionError as error:
            raise ScriptError("line 1: brackets, functions or expansions are nested too deeply") from error

    def output(self, node: Node) -> str | None:
        outer, commands = self._output, len(self.commands)
        self._output = []
        self._subshell(node)
        result = "".join(self._output).rstrip("\n")
        self._output = outer
        reads_file = any(child.type == "file_redirect" for child in node.named_children)
        return None if reads_file or len(self.commands) > commands else result

    # The structure of the script.

    def _run(self, node: Node) -> Status:
        """Follow one statement."""
        match node.type:
            case "comment" | "file_redirect":
                return True
            case "program" | "compound_statement" | "pipeline" if node.children[:1] and node.children[0].type != "((":
                return self._all(node.named_children)
            case "subshell":
                return self._subshell(node)
            case "list":
                left, operator, right = (child for child in node.children if child.type != "comment")
                status = self._run(left)
                goes_on = status if operator.type == "&&" else opposite(status)
                following = self._branch(goes_on, operator, [right])
                return following if goes_on else status
            case "negated_command":
                return opposite(self._all(node.named_children))
            case "if_statement":
                return self._if(node)
            case "case_statement":
                return self._case(node)
            case "for_statement" if (items := self._items(node)) is not None:
                for item in items:
                    self.bind(source_of(node.named_children[0]), item, self.line(node))
                    self._all(node.named_children[-1].named_children)
                return None
            case "while_statement" if self._all(_behind(node, node.children[0].type)) is _NEVER[node.children[0].type]:
                return True
            case "function_definition" if self.doubt:
                raise ScriptError(f"line {self.line(node)}: line {self.doubt} decides whether this function is defined")
            case "function_definition":
                self._functions[source_of(node.named_children[0])] = node.named_children[-1]
                return True
            case "test_command":
                return self._test(node)
            case "redirected_statement" | "command":
                return self._command(node)
            case "variable_assignment" | "variable_assignments" | "declaration_command":
                return self._declare(node)
            case "program":
                return True
        return self._undecided(node)

    def _all(self, nodes: Iterable[Node]) -> Status:
        status: Status = True
        for node in nodes:
            status = self._run(node)
        return status

    def _branch(self, status: Status, start: Node, nodes: Iterable[Node]) -> Status:
        """Follow a part of the script that is run where `status` holds."""
        if status:
            return self._all(nodes)
        if status is None:
            outer = self.doubt
            self.doubt = self.doubt or self.line(start)
            # A way in doubt that ends the script is not the one on which verl is started.
            with contextlib.suppress(_Ended):
                self._all(nodes)
            self.doubt = outer
        return None

    def _undecided(self, node: Node) -> Status:
        """Follow the parts of a node, such as a loop, of which it is not known whether and how often they are run."""
        outer = self.doubt
        self.doubt = self.doubt or self.line(node)
        for child in node.named_children:
            if child.type == "variable_name" or child.type.endswith("_expression"):
                self._hide(source_of(child), node)
            elif child.type.endswith(("_statement", "_command", "_assignment", "command", "list", "subshell")):
                self._branch(None, node, [child])
            elif child.type == "do_group":
                self._branch(None, node, child.named_children)
        self.doubt = outer
        return None

    def _subshell(self, node: Node) -> Status:
        variables = dict(self.variables)
        try:
            return self._all(node.named_children)
        except _Ended:
            return None
        finally:
            self.variables = variables

    def _if(self, node: Node) -> Status:
        reached: Status = True
        for part in (node, *(child for child in node.children if child.type.endswith("_clause"))):
            status: Status = True
            if part.type != "else_clause":
                status = self._branch(reached, node, _behind(part, part.children[0].type))
            self._branch(both(reached, status), node, _behind(part, "else" if part.type == "else_clause" else "then"))
            reached = both(reached, opposite(status))
        return None

    def _case(self, node: Node) -> Status:
        value, *items = (child for child in node.named_children if child.type != "comment")
        subject = self.text(value)
        reached: Status = True
        for item in items:
            place = next(place for place, child in enumerate(item.children) if child.type == ")")
            fits: Status = False
            for pattern in item.children[:place]:
                fits = either(fits, self._fits(subject, [pattern])) if pattern.is_named else fits
            if item.children[-1].type in (";&", ";;&"):
                raise ScriptError(f"line {self.line(item)}: a case that goes on with the next one is not followed here")
            self._branch(both(reached, fits), node, [child for child in item.children[place:] if child.is_named])
            reached = both(reached, opposite(fits))
        return None

    def _items(self, node: Node) -> list[str] | None:
        """The words that a loop goes through; None where they are not known, or where it may stop before the end."""
        if [child.type for child in node.children[:3:2]] != ["for", "in"] or _STOPS.search(source_of(node)):
            return None
        items = [field for word in node.named_children[1:-1] for field in self.fields(word)]
        self._rounds += len(items)
        return None if self._rounds > MAX_ROUNDS or self.why(" ".join(items)) else items

    def _fits(self, value: str, patterns: list[Node]) -> Status:
        """Whether a value fits a pattern, which may be several nodes; a quoted one stands for itself."""
        text = "".join(map(self.text, patterns))
        if self.why(value + text):
            return True if text == "*" else None
        if all(node.type in ("string", "raw_string") for node in patterns):
            return value == text
        return None if re.search(r"[\"'$`\\(]", text) else fnmatchcase(value, text)

    def _test(self, node: Node) -> Status:
        """Whether the test in `[ ... ]` or `[[ ... ]]` holds."""
        inner = node.named_children
        match node.type, [child.type for child in node.children]:
            case "test_command" | "parenthesized_expression", [_, _, _]:
                return self._test(inner[0])
            case "string" | "word" | "number" | "simple_expansion" | "expansion" | "concatenation", _:
                text = self.text(node)
                # Without quotes, `[ ... ]` takes other words than one for a test.
                return None if self.why(text) or (node.type != "string" and len(text.split()) > 1) else bool(text)
            case "unary_expression" | "negated_command", ["!", _]:
                return opposite(self._test(inner[0]))
            case "unary_expression", ["test_operator", _] if source_of(inner[0]) in ("-z", "-n"):
                text = self.text(inner[1])
                return None if self.why(text) else bool(text) == (source_of(inner[0]) == "-n")
            case "binary_expression", [_, "&&", _]:
                return both(self._test(inner[0]), self._test(inner[1]))
            case "binary_expression", [_, "||", _]:
                return either(self._test(inner[0]), self._test(inner[1]))
            case "binary_expression", [_, "=" | "==", *_]:
                return self._fits(self.text(inner[0]), inner[1:])
            case "binary_expression", [_, "!=", *_]:
                return opposite(self._fits(self.text(inner[0]), inner[1:]))
            case "binary_expression", [_, "test_operator", _] if source_of(inner[1]) in COMPARISONS:
                left, right = self.text(inner[0]), self.text(inner[2])
                if re.fullmatch(r"-?\d{1,18} -?\d{1,18}", f"{left} {right}"):
                    return COMPARISONS[source_of(inner[1])](int(left), int(right))
        return None

    # Simple commands.

    def _declare(self, node: Node) -> Status:
        for child in [node] if node.type == "variable_assignment" else node.named_children:
            if self._local is not None and node.children[0].type in ("local", "declare", "typeset"):
                self._local.append(re.split(r"[+=[]", source_of(child))[0])
            if child.type == "variable_assignment":
                self.assign(child)
            elif re.search("[$`]", source_of(child)):
                self.notes.append(
                    f"line {self.line(child)}: the variables that `{source_of(child)}` sets are not known"
                )
        return None if re.search(r"\$\(|`", source_of(node)) else True

    def _hide(self, text: str, node: Node) -> Status:
        """Every name in `text` is a variable that the shell sets to what is not known here."""
        line = self.line(node)
        for name in re.findall(r"[A-Za-z_]\w*", text):
            self.bind(name, self.unknown(f"${name}", f"is set by the shell in line {line}"), line)
        return None

    def _command(self, node: Node) -> Status:
        before = len(self._output)
        try:
            return self._redirected(node)
        finally:
            if any(re.match("[1&]?>", source_of(part)) for part in node.named_children if part.type == "file_redirect"):
                del self._output[before:]

    def _redirected(self, node: Node) -> Status:
        parts = list(node.named_children)
        if node.type == "redirected_statement" and parts[0].type == "command":
            parts[:1] = parts[0].named_children
        more: list[Node] = []
        for part in parts:
            if part.type == "file_redirect":
                # The parser takes the words behind a redirection into it.
                more += part.children_by_field_name("destination")[1:]
            if part.type == "heredoc_redirect" and any("_" not in child.type for child in part.named_children):
                raise ScriptError(f"line {self.line(part)}: a command behind `<<` is not followed here")
        words = [part for part in parts if not part.type.endswith("_redirect")]
        if words and words[0].type not in ("command_name", "variable_assignment"):
            if more:
                raise ScriptError(f"line {self.line(node)}: words behind a redirection are not followed here")
            return self._run(words[0])
        # The parser takes assignments on lines of their own for the beginning of the next command.
        own_lines = 0
        for place, (word, following) in enumerate(itertools.pairwise(words)):
            text = (word.parent.text or b"")[word.end_byte - word.parent.start_byte :] if word.parent else b""
            between = text[: following.start_byte - word.end_byte]
            if word.type == "variable_assignment" and re.search(rb"(?<!\\)\n", between):
                own_lines = place + 1
        for word in words[:own_lines]:
            self.assign(word)
        words = [word for word in words if word.type != "variable_assignment"]
        name = list(words[0].children) if words else []
        arguments = [field for word in [*name, *words[1:], *more] for field in self.fields(word)]
        return self._start(arguments, node) if arguments else True

    def _start(self, arguments: list[str], node: Node) -> Status:
        """Follow a command whose words are expanded."""
        name, *others = arguments
        line = self.line(node)
        if name in self._functions:
            return self._call(self._functions[name], others)
        if name == "exit" or (name == "return" and not self.doubt):
            raise _Ended(name)
        if name in ("return", "shift") or (name == "set" and "--" in others):
            raise ScriptError(f"line {line}: a `{name}` is not followed here")
        if name == "eval" or (name in ("bash", "sh") and others[:1] in (["-c"], ["-lc"]) and len(others) > 1):
            outer, self._first_line = self._first_line, line
            status = self._run(self.parse(" ".join(others) if name == "eval" else others[1]))
            self._first_line = outer
            return status
        if name in ("source", "."):
            source = self.shown(" ".join(arguments))
            self.notes.append(f"line {line}: the file of `{source}` is not read; give it in front of this script")
        elif name in ("echo", "pwd", "basename", "dirname") and (said := self._said(name, others)) is not None:
            self._output.append(self.unknown(said, f"depends on line {self.doubt}") if self.doubt else said)
        elif name in ("cd", "pushd", "popd"):
            return self._change_folder(arguments, line)
        elif name == "getopts" and not self.arguments:
            return False
        elif name in _READERS or (name == "printf" and "-v" in others):
            return self._hide(" ".join(others), node)
        elif name == "false" or (name.startswith("python") and others == ["-c", "import torch_npu"]):
            return False
        elif name not in _IGNORED or (name == "exec" and others):
            self.commands.append(Command(arguments, line, self.doubt))
            if name == "exec" and not self.doubt:
                raise _Ended(name)
            return None
        return True

    def _said(self, name: str, arguments: list[str]) -> str | None:
        """What a command prints; None where that is not worked out."""
        if name == "echo":
            newline = arguments[:1] != ["-n"]
            text = " ".join(arguments[not newline :])
            return self.unknown(text, "is an echo with options") if re.match("-[neE]", text) else text + "\n" * newline
        if name == "pwd":
            folder = self.variables.get("PWD")
            return f"{folder}\n" if isinstance(folder, str) and not arguments else None
        said = None if self.why(" ".join(arguments)) else file_name(name, arguments)
        return None if said is None else said + "\n"

    def _change_folder(self, arguments: list[str], line: int) -> Status:
        """Keep PWD. Only the folders above the script, and above the one in which it is started, are known to exist."""
        before, (name, *others) = self.variables.get("PWD") or "", arguments
        others = others[others[:1] == ["--"] :]
        known = name == "cd" and len(others) == 1 and not others[0].startswith("-")
        if known and isinstance(before, str) and not self.why(before + others[0]):
            folder = os.path.normpath(os.path.join(before, others[0]))
            if any(f"{below}/".startswith(f"{folder.rstrip('/')}/") for below in self._folders):
                self.bind("PWD", folder, line)
                self.bind("OLDPWD", before, line)
                return True
        for variable in ("PWD", "OLDPWD"):
            self.bind(
                variable, self.unknown(f"${variable}", f"depends on the folders of the machine (line {line})"), line
            )
        return None

    def _call(self, body: Node, arguments: list[str]) -> Status:
        outer = self.arguments, self._local
        self.arguments, self._local = arguments, []
        status: Status = None
        try:
            status = self._run(body)
        except _Ended as end:
            if str(end) != "return":
                raise
        self._hide(" ".join(self._local), body)
        self.arguments, self._local = outer
        return status


def _behind(node: Node, word: str) -> list[Node]:
    """The statements behind the keyword `word` of a node, up to the next keyword."""
    types = [child.type for child in node.children]
    start = types.index(word) + 1
    end = next((place for place in range(start, len(types)) if types[place] in _KEYWORDS), len(types))
    return [child for child in node.children[start:end] if child.is_named]
