"""What every command does around its own work: it stops when a signal asks for it, and outlives its console."""

import functools
from collections.abc import Callable
from typing import ParamSpec

from pipeline.run.output import lasting
from pipeline.run.signals import INTERRUPTED, exit_code, stops

P = ParamSpec("P")


def command(main: Callable[P, int]) -> Callable[P, int]:
    """A `main` that raises `KeyboardInterrupt` at any signal of `STOPS` and writes to a console that may go away.

    Its exit code is 128 and the number of the signal if a signal interrupted it.
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
