"""The wrapper of every command: signals stop the command, and it outlives its console."""

import functools
from collections.abc import Callable
from typing import ParamSpec

from pipeline.run.output import lasting
from pipeline.run.signals import INTERRUPTED, exit_code, stops

P = ParamSpec("P")


def command(main: Callable[P, int]) -> Callable[P, int]:
    """Wrap a `main` so that any signal of `STOPS` raises `KeyboardInterrupt`, and writes survive the end of the
    console.

    The exit code is 128 and the number of the signal if a signal interrupted it.
    """

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        with lasting(), stops() as received:
            try:
                code = main(*args, **kwargs)
            except KeyboardInterrupt:
                code = INTERRUPTED
            return exit_code(code, received)

    return run
