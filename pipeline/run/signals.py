"""Signals that stop a command: Ctrl-C, and those by which batch systems, services and terminals end a job."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that stop a command. Batch systems warn with SIGUSR1 or SIGUSR2 before they kill."""
TOGETHER_S = 2.0
"""Signals within this many seconds are one request: `timeout` sends TERM to its child and to the child's group, and a
terminal that closes sends HUP from the kernel and from the shell."""
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C stopped."""


@contextmanager
def stops() -> Iterator[list[int]]:
    """Raise `KeyboardInterrupt` in the main thread at each signal of `STOPS` while the block runs, as for Ctrl-C.

    At the first signal a run ends its iteration and saves; a second one ends the run at once. A signal that is ignored
    when the block is entered stays ignored (`nohup`, a script's `&`), and so does a handler of other code.

    Yields:
        The numbers of the signals that came, in order; the list grows.
    """
    received: list[int] = []
    before: dict[signal.Signals, object] = {}
    last = -TOGETHER_S

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= TOGETHER_S:
            last = now
            received.append(number)
            raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for number in STOPS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, stop)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


def exit_code(code: int, received: list[int]) -> int:
    """Return the exit code of a command that would end with `code`: if a signal interrupted it, 128 plus the signal's
    number."""
    return 128 + received[0] if code == INTERRUPTED and received else code
