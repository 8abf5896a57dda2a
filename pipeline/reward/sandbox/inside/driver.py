"""The first code in the process of a program under test.

It runs the program as a script, calls one function of it, or has it answer a judge (`judge.py`). It shares its process
with hostile code: it knows no expected value, and what it writes is data to its readers.
"""

from __future__ import annotations

import builtins
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes as long to import as a small program to run
    from typing import Any

REQUESTS, REPLIES = 3, 4  # file descriptors of the pipes to and from a judge; a call writes its result to the second
PROGRAM = "solution.py"
MAX_ITEMS = 1_000_000  # of an iterator that is read to its end for the judge


def main(kind: str, packages: list[str], requests: int = REQUESTS, replies: int = REPLIES) -> None:
    """Run the program in the current folder as a test of `kind` (`script`, `call` or `assert`) asks for."""
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.dirname(__file__))] + packages
    # The `site` module, which is not loaded, would define these.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    sys.argv = [PROGRAM]
    if kind != "script":
        # A fork that the program does not end fails, and answers nothing.
        os.register_at_fork(after_in_child=lambda: os.close(replies))
    with open(PROGRAM, encoding="utf-8", errors="surrogateescape") as file:
        source = file.read()
    if kind == "call":
        _call(source, replies)
    elif kind == "assert":
        _serve(source, requests, replies)
    else:
        scope = sys.modules["__main__"].__dict__
        scope.clear()
        scope.update(__name__="__main__", __file__=PROGRAM, __builtins__=builtins)
        exec(compile(source, PROGRAM, "exec"), scope)


def _load(source: str) -> Any:
    """The program as a module, so that its `if __name__ == "__main__"` does not run."""
    module = sys.modules["solution"] = type(sys)("solution")
    exec(compile(source, PROGRAM, "exec"), module.__dict__)
    return module


def _call(source: str, replies: int) -> None:
    """Write what the function that stdin names, or the method of `Solution`, returns for the arguments on stdin."""
    import json

    from . import values

    name, packed = json.load(sys.stdin)
    try:
        module = _load(source)
        owner = module if hasattr(module, name) or not hasattr(module, "Solution") else module.Solution()
        reply: Any = {"value": values.pack(getattr(owner, name)(*values.unpack(packed)))}
    except BaseException as error:  # noqa: BLE001 - SystemExit as well is a failure of the program
        reply = {"error": ": ".join(_described(error))}
    values.write(replies, json.dumps(reply, separators=(",", ":")).encode())
    os._exit(0)


def _serve(source: str, requests: int, replies: int) -> None:
    """Answer requests of a judge until it closes its pipe."""
    import itertools
    import operator

    from . import values

    pipe = open(requests, "rb")  # noqa: SIM115 - open until the process ends
    objects: list[Any] = []

    def handle(value: Any) -> list[Any]:
        if isinstance(value, type(sys)) and value is not objects[0]:
            return ["h", -1, value.__name__]
        objects.append(value)
        return ["h", len(objects) - 1, type(value).__name__]

    def answer(kind: str, arguments: list[Any]) -> Any:
        if kind == "attribute":
            return {"value": values.pack(getattr(*arguments), handle)}
        if kind == "call":
            function, given, named = arguments
            result = function(*given, **named)
            # Arguments that the function changed in place are changed for the judge as well.
            return {"value": values.pack(result, handle), "given": values.pack(given, handle)}
        if kind == "items":
            return {"value": values.pack(list(itertools.islice(iter(arguments[0]), MAX_ITEMS)), handle)}
        return {"value": values.pack(getattr(operator, kind)(*arguments), handle)}

    try:
        objects.append(_load(source))
        reply: Any = {"names": [name for name in vars(objects[0]) if not name.startswith("__")]}
    except BaseException as error:  # noqa: BLE001 - the judge has to hear of anything that the program raises
        reply = {"error": _described(error)}
    while True:
        values.send(replies, reply)
        try:
            kind, packed = values.receive(pipe)
        except EOFError:
            return
        try:
            reply = answer(kind, values.unpack(packed, lambda index, _: objects[index]))
        except BaseException as error:  # noqa: BLE001
            reply = {"error": _described(error)}


def _described(error: BaseException) -> tuple[str, str]:
    try:
        message = str(error)[:200]
    except BaseException:  # noqa: BLE001 - `__str__` is the program's
        message = ""
    return type(error).__name__, message
