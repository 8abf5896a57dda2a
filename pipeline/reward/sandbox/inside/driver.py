"""The first code of a program under test: runs it as a script, or has it answer a judge (`responder.py`)."""

import builtins
import os
import sys

REQUESTS, REPLIES = 3, 4  # file descriptors of the judge's pipes
PROGRAM = "solution.py"


def prepare(packages: list[str]) -> str:
    """Source of the program, with the import path set and what the `site` module would define defined."""
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.dirname(__file__))] + packages
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    sys.argv = [PROGRAM]
    with open(PROGRAM, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def main(mode: str, packages: list[str]) -> None:
    """`mode` is `script` (input and output are the program's) or `serve`."""
    source = prepare(packages)
    if mode == "serve":
        from . import responder  # imports more than a script needs

        responder.serve(source)
        return
    scope = sys.modules["__main__"].__dict__
    scope.clear()
    scope.update(__name__="__main__", __file__=PROGRAM, __builtins__=builtins)
    exec(compile(source, PROGRAM, "exec"), scope)
