"""Run a program under test: this is the first code in its process.

It runs the program as a script, or calls functions of the program. The process is shared with hostile code, so it never
holds an expected value or a later call, and its output is read as data only.

A call is a line of JSON, `[target, arguments, named arguments]`, the last two packed (`values.py`). The target is the
name of a function in the program (or of a method of its class `Solution`), or `[number of an earlier call, name]` for a
method of that call's result. The result is a line with an object of one key: `value` (packed), `other` (the reason why
the value is not plain data) or `error`.
"""

from __future__ import annotations

import builtins
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes as long to import as a small program to run
    from typing import Any

REQUESTS, REPLIES = 3, 4  # file descriptors of the calls and of their answers
PROGRAM = "solution.py"


def main(kind: str, packages: list[str], requests: int = REQUESTS, replies: int = REPLIES) -> None:
    """Run the program `solution.py` in the current folder as a test.

    Args:
        kind: `script` or `calls`.
        packages: folders to add to `sys.path`.
        requests, replies: file descriptors of the pipes for calls and for results.
    """
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.dirname(__file__))] + packages
    # The `site` module, which is not loaded, would define these.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    sys.argv = [PROGRAM]
    if kind != "script":
        # A fork of the program has no pipes, so it cannot take calls or send results.
        for pipe in (requests, replies):
            os.register_at_fork(after_in_child=lambda pipe=pipe: os.close(pipe))
    with open(PROGRAM, encoding="utf-8", errors="surrogateescape") as file:
        source = file.read()
    if kind == "calls":
        _answer(source, requests, replies)
    else:
        scope = sys.modules["__main__"].__dict__
        scope.clear()
        scope.update(__name__="__main__", __file__=PROGRAM, __builtins__=builtins)
        exec(compile(source, PROGRAM, "exec"), scope)


def _load(source: str) -> Any:
    """Load the program as a module, so that its `if __name__ == "__main__"` does not run."""
    module = sys.modules["solution"] = type(sys)("solution")
    exec(compile(source, PROGRAM, "exec"), module.__dict__)
    return module


def _answer(source: str, requests: int, replies: int) -> None:
    """Make the calls that arrive in the pipe `requests` and write their results to `replies`, until the pipe ends."""
    from . import values

    pipe = open(requests, "rb")  # noqa: SIM115 - open until the process ends
    results: dict[int, Any] = {}
    broken = None
    try:
        module = _load(source)
    except BaseException as error:  # noqa: BLE001 - SystemExit as well is a failure of the program
        broken = _described(error)
    number = 0
    while True:
        try:
            target, given, named = values.receive(pipe)
        except EOFError:
            return
        try:
            if broken is None:
                arguments = values.unpack(given, results), values.unpack(named, results)
                results[number] = _function(module, results, target)(*arguments[0], **arguments[1])
                reply = _packed(results[number])
            else:
                reply = {"error": broken}
        except BaseException as error:  # noqa: BLE001 - any exception of the program is its answer
            reply = {"error": _described(error)}
        number += 1
        values.send(replies, reply)


def _function(module: Any, results: dict[int, Any], target: Any) -> Any:
    if isinstance(target, list):
        return getattr(results[target[0]], target[1])
    if hasattr(module, target):
        return getattr(module, target)
    if hasattr(module, "Solution"):
        return getattr(module.Solution(), target)
    raise NameError(f"name {target!r} is not defined")


def _packed(result: Any) -> dict[str, Any]:
    from . import values

    try:
        return {"value": values.pack(result)}
    except values.NotPlain as error:
        return {"other": str(error)[:200]}


def _described(error: BaseException) -> str:
    try:
        message = str(error)[:200]
    except BaseException:  # noqa: BLE001 - `__str__` is the program's
        message = ""
    return f"{type(error).__name__}: {message}"
