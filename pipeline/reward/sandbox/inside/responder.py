"""Loads a program as a module and answers a judge's requests about it.

It shares its process with hostile code and is therefore believed nothing: it knows no expected value, and what it
answers is data to the judge.
"""

import io
import itertools
import operator
import sys
import types
from typing import Any

from . import values
from .driver import PROGRAM, REPLIES, REQUESTS

MAX_ITEMS = 1_000_000  # of an iterator that is read to its end for the judge


def serve(source: str) -> None:
    """Loads the program as a module and answers requests until the judge closes its pipe."""
    sys.stdin = io.StringIO()
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    objects: list[Any] = []

    def handle(value: Any) -> list[Any]:
        if isinstance(value, types.ModuleType):
            return ["h", -1, value.__name__]
        objects.append(value)
        return ["h", len(objects) - 1, type(value).__name__]

    def answer(request: Any) -> Any:
        kind, arguments = request[0], values.unpack(request[1], lambda index, _: objects[index])
        if kind == "name":
            return {"value": values.pack(getattr(module, arguments[0]), handle)}
        if kind == "method":
            name, given = arguments
            owner = module if hasattr(module, name) or not hasattr(module, "Solution") else module.Solution()
            return {"value": values.pack(getattr(owner, name)(*given), handle)}
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

    # Anything may be raised by the program, SystemExit as well; all of it is the judge's to see.
    try:
        exec(compile(source, PROGRAM, "exec"), module.__dict__)
        reply: Any = {"names": [name for name in vars(module) if not name.startswith("__")]}
    except BaseException as error:  # noqa: BLE001
        reply = _failure(error)
    while True:
        values.send(REPLIES, reply)
        try:
            request = values.receive(REQUESTS)
        except EOFError:
            return
        try:
            reply = answer(request)
        except BaseException as error:  # noqa: BLE001
            reply = _failure(error)


def _failure(error: BaseException) -> dict[str, Any]:
    try:
        message = str(error)[:200]
    except BaseException:  # noqa: BLE001
        message = ""
    return {"error": [type(error).__name__, message]}
