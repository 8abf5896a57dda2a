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


# Of these the first would look like the test's own failure, and the others would end an iteration early, with the
# asserts that were still to come left out.
_NOT_RAISED = (AssertionError, StopIteration, StopAsyncIteration)


class ProgramError(Exception):
    """The program raised something that is no built-in exception, or cannot be spoken to."""


class Channel:
    """Requests to the program's process, one at a time."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests, self.replies = requests, replies

    def start(self) -> set[str]:
        """Waits for the program to be loaded; its global names."""
        names = self._reply().get("names")
        return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()

    def ask(self, kind: str, *arguments: Any) -> dict[str, Any]:
        """The program's answer, still packed; what it raised is raised here."""
        values.send(self.requests, [kind, values.pack(arguments, _handle_of)])
        return self._reply()

    def value(self, kind: str, *arguments: Any) -> Any:
        """The program's answer as a value."""
        return self.read(self.ask(kind, *arguments).get("value"))

    def read(self, data: Any) -> Any:
        """A packed value with its handles made `Remote` objects."""
        return values.unpack(data, self.object)

    def object(self, index: int, name: str) -> Any:
        """What a handle stands for."""
        if index >= 0:
            return Remote(self, index, name)
        if name in sys.stdlib_module_names:
            return importlib.import_module(name)
        raise ProgramError(f"a test cannot use the module {name} of the program")

    def _reply(self) -> dict[str, Any]:
        reply = values.receive(self.replies)
        if not isinstance(reply, dict):
            raise ProgramError("the program's answer is no answer")
        if "error" in reply:
            name, message = (str(part)[:MAX_REASON] for part in reply["error"])
            kind = getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception) and kind not in _NOT_RAISED:
                try:
                    error = kind(message)
                except TypeError:  # UnicodeDecodeError and its like take more arguments
                    error = ProgramError(f"{name}: {message}")
                raise error
            raise ProgramError(f"{name}: {message}")
        return reply


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
        changed = self._channel.read(answer.get("given"))
        for old, new in zip(given, changed, strict=True):
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

    def __ne__(self, other: object) -> bool:
        return not self == other


def _operator(kind: str, both: bool) -> Callable[..., Any]:
    def method(self: Remote, *others: Any) -> Any:
        if both and not all(isinstance(other, Remote) for other in others):
            return NotImplemented
        return self._channel.value(kind, self, *others)

    return method


for _kind in ("lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "and", "or"):
    setattr(Remote, f"__{_kind}__", _operator(f"{_kind}_" if _kind in ("and", "or") else _kind, both=True))
for _kind in ("getitem", "contains"):
    setattr(Remote, f"__{_kind}__", _operator(_kind, both=False))
setattr(Remote, "__len__", lambda self: int(self._channel.value("length_hint", self)))  # noqa: B010


def _handle_of(value: Any) -> list[Any]:
    if isinstance(value, Remote):
        return ["h", value._index, ""]
    raise ProgramError(f"a test cannot hand a {type(value).__name__} to the program")


def _follow(old: Any, new: Any) -> None:
    """Makes the mutable `old` equal `new`, its copy that the program has had."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = new
    elif isinstance(old, dict) and isinstance(new, dict) or isinstance(old, set) and isinstance(new, set):
        old.clear()
        old.update(new)


class _Names(dict[str, Any]):
    """Global names of a test; those of the program are fetched when they are first used."""

    def __init__(self, channel: Channel, names: set[str], shadowing: bool) -> None:
        super().__init__(__name__="test")
        self.channel, self.names, self.shadowing = channel, names, shadowing

    def __missing__(self, name: str) -> Any:
        if name not in self.names or hasattr(builtins, name) and not self.shadowing:
            raise KeyError(name)
        try:
            self[name] = self.channel.value("name", name)
        except KeyError as error:  # would mean that there is no such name, and Python would look among the builtins
            raise ProgramError(f"KeyError: {error}") from error
        return self[name]


def check(source: str, channel: Channel) -> None:
    """Runs one test; returns if every assert holds.

    Raises:
        Exception: an assert fails, or whatever the test or the program raises.
    """
    tree = ast.parse(source)
    names = channel.start()
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    scope = _Names(channel, names, shadowing=not any(name in names and not hasattr(builtins, name) for name in used))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = node.value.id
            if name in names and name in sys.stdlib_module_names:
                scope[name] = importlib.import_module(name)
    exec(compile(tree, "test", "exec"), scope)


def call(name: str, arguments: Any, channel: Channel) -> Any:
    """Result of the program's function `name` (or method of its class `Solution`), packed."""
    channel.start()
    return channel.ask("method", name, values.unpack(arguments, channel.object)).get("value")


def verdict(test: dict[str, Any], requests: int, replies: int) -> dict[str, Any]:
    """What came of one test: `passed`, `reason`, and for a call `value`."""
    channel = Channel(requests, replies)
    try:
        if test["kind"] == "call":
            return {"passed": True, "reason": "", "value": call(test["name"], test["arguments"], channel)}
        check(test["source"], channel)
    except EOFError:
        return {"passed": False, "reason": "the program ended before the test did"}
    except BrokenPipeError:
        return {"passed": False, "reason": "the program ended before the test did"}
    except AssertionError as error:
        return {"passed": False, "reason": f"assertion failed {error}".strip()[:MAX_REASON]}
    # A test may raise whatever it likes: it has failed then, and says why.
    except Exception as error:  # noqa: BLE001
        return {"passed": False, "reason": f"{type(error).__name__}: {error}"[:MAX_REASON]}
    return {"passed": True, "reason": ""}
