"""Wrapper of every command: signals stop the command, and it continues if its console is closed."""

import functools
from collections.abc import Callable
from typing import ParamSpec

from pipeline.run.output import lasting
from pipeline.run.signals import INTERRUPTED, exit_code, stops

P = ParamSpec("P")


def command(main: Callable[P, int]) -> Callable[P, int]:
    """Wrap a `main`: any signal of `STOPS` raises `KeyboardInterrupt`, and output to a closed console does not fail.

    If a signal interrupted the command, its exit code is 128 plus the number of the signal.
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
