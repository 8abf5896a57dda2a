"""SIGTERM as Ctrl-C: `ray job stop`, Kubernetes and batch systems end a driver by SIGTERM."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """While the block runs, SIGTERM raises `KeyboardInterrupt` in the main thread, as Ctrl-C does.

    The first one therefore lets the iteration in work end and saves; the second one ends the run at once. To be entered
    in the main thread and after `ray.init`, whose own handler exits without saving.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
