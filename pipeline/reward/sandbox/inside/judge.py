"""Runs asserts in a process of its own, apart from the program they test.

The names of the program are `Remote` objects here: a call sends its arguments to the program's process and brings the
result back as plain data (`values.py`). So the program can answer, but never decide: ending early, printing, a result
whose `__eq__` is always true, or builtins that it replaced make no assert pass. Names are found in this order:

1. what the test itself defines or imports;
2. before a dot, the module of the standard library with that name;
3. Python's builtins, unless a test uses no other name of the program (a task may ask for a function named `sum`);
4. names of the program.

An object that is no plain data stays in the program's process and is known here by a handle. Two handles are compared
by the program (its class, its rules); a handle never equals plain data.
"""

import ast
import builtins
import importlib
import sys
from collections.abc import Callable
from typing import Any

from . import values

MAX_REASON = 200  # characters
MODULE = 0  # handle of the program itself

# Of these the first would look like the test's own failure, and the others would end an iteration early, with the
# asserts that were still to come left out.
_NOT_RAISED = (AssertionError, StopIteration, StopAsyncIteration)


class ProgramError(Exception):
    """The program raised an exception that is not built in, or its process does not answer properly."""


class Channel:
    """Requests to the program's process, one at a time."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests = requests
        self.replies = open(replies, "rb", closefd=False)  # noqa: SIM115 - open until the process ends

    def reply(self) -> dict[str, Any]:
        """The program's next answer, still packed. An exception in the program is raised again here."""
        reply = values.receive(self.replies)
        if not isinstance(reply, dict):
            raise ProgramError("the program's answer is no answer")
        if "error" not in reply:
            return reply
        name, message = (str(part)[:MAX_REASON] for part in reply["error"])
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind not in _NOT_RAISED:
            try:
                error = kind(message)
            except TypeError:  # UnicodeDecodeError and its like take more arguments
                error = ProgramError(f"{name}: {message}")
            raise error
        raise ProgramError(f"{name}: {message}")

    def ask(self, kind: str, *arguments: Any) -> dict[str, Any]:
        values.send(self.requests, [kind, values.pack(arguments, _handle_of)])
        return self.reply()

    def value(self, kind: str, *arguments: Any) -> Any:
        """The program's answer to a request as a value."""
        return self.read(self.ask(kind, *arguments).get("value"))

    def read(self, data: Any) -> Any:
        """Unpack a value; its handles become `Remote` objects."""
        return values.unpack(data, self._object)

    def _object(self, index: int, name: str) -> Any:
        if index >= 0:
            return Remote(self, index, name)
        if name in sys.stdlib_module_names:
            return importlib.import_module(name)
        raise ProgramError(f"a test cannot use the module {name} of the program")


class Remote:
    """An object of the program."""

    def __init__(self, channel: Channel, index: int, name: str) -> None:
        self.__dict__.update(_channel=channel, _index=index, _name=name)

    def __repr__(self) -> str:
        return f"<{self._name} of the program>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._channel.value("attribute", self, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        answer = self._channel.ask("call", self, given, named)
        for old, new in zip(given, self._channel.read(answer.get("given")), strict=True):
            _follow(old, new)
        return self._channel.read(answer.get("value"))

    def __iter__(self) -> Any:
        return iter(self._channel.value("items", self))

    def __bool__(self) -> bool:
        return True

    def __hash__(self) -> int:
        return 0  # equal objects may have several handles

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._channel.value("eq", self, other) is True

    def __len__(self) -> int:
        return int(self._channel.value("length_hint", self))


def _operator(name: str, between_objects: bool) -> Callable[[Remote, Any], Any]:
    def method(self: Remote, other: Any) -> Any:
        if between_objects and not isinstance(other, Remote):
            return NotImplemented
        return self._channel.value(name, self, other)

    return method


for _name in ("lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "and_", "or_", "getitem", "contains"):
    setattr(Remote, f"__{_name.rstrip('_')}__", _operator(_name, _name not in ("getitem", "contains")))


def _handle_of(value: Any) -> list[Any]:
    if isinstance(value, Remote):
        return ["h", value._index, ""]
    raise ProgramError(f"a test cannot hand a {type(value).__name__} to the program")


def _follow(old: Any, new: Any) -> None:
    """Make the mutable `old` equal `new`, its copy that the program has had."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = new
    elif isinstance(old, dict) and isinstance(new, dict) or isinstance(old, set) and isinstance(new, set):
        old.clear()
        old.update(new)


class _Scope(dict[str, Any]):
    """Global names of a test; those of the program are fetched when they are first used."""

    def __init__(self, channel: Channel, names: set[str], tree: ast.AST) -> None:
        super().__init__(__name__="test")
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if any(name in names and not hasattr(builtins, name) for name in used):
            names = {name for name in names if not hasattr(builtins, name)}
        self.channel, self.names = channel, names
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = node.value.id
                if name in names and name in sys.stdlib_module_names:
                    self[name] = importlib.import_module(name)

    def __missing__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(name)
        try:
            self[name] = self.channel.value("attribute", Remote(self.channel, MODULE, "module"), name)
        except KeyError as error:  # would mean that there is no such name, and Python would look among the builtins
            raise ProgramError(f"KeyError: {error}") from error
        return self[name]


def failure(source: str, requests: int, replies: int) -> str:
    """Why the test `source` fails, in a few words; "" if every assert in it holds.

    The program's driver reads the file descriptor `requests` and writes `replies`.
    """
    channel = Channel(requests, replies)
    try:
        tree = ast.parse(source)
        names = {name for name in channel.reply()["names"] if isinstance(name, str)}
        exec(compile(tree, "test", "exec"), _Scope(channel, names, tree))
    except (EOFError, BrokenPipeError):
        return "the program ended before the test did"
    except AssertionError as error:
        return f"assertion failed {error}".strip()[:MAX_REASON]
    # A test, and the program in it, may raise anything: the test has failed then, and says why.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"[:MAX_REASON]
    return ""
