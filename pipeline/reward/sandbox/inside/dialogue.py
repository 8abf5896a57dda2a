"""Send the calls of a test to the program's process one at a time, and collect the results.

A call is sent when the result of the one before has arrived. So a program does not know later calls while it chooses a
result, and the calls do not depend on results. Results are lines, one per call in order; their content is not read
here.
"""

from __future__ import annotations

import os
import select

from . import values

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes as long to import as a small program to run
    from collections.abc import Callable, Sequence

CHUNK = 1 << 16


class Dialogue:
    """This side of the two pipes to a program: calls go out, results come back."""

    def __init__(self, calls: Sequence[str], requests: int, replies: int, keep: Callable[[bytes], object]) -> None:
        """Store the calls and the ends of the pipes.

        Args:
            calls: the calls, each as a line of JSON (see `driver.py`).
            requests, replies: file descriptors of the pipe to write calls to and of the pipe to read results from.
            keep: function that gets the bytes of the results as they arrive.
        """
        self._calls, self._requests, self._replies, self._keep = calls, requests, replies, keep
        self._sent = self._answered = self._kept = 0
        self._unsent, self._polled = b"", False
        for fd in (requests, replies):
            os.set_blocking(fd, False)  # the program need not read, nor write

    def step(self, poll: select.poll) -> str:
        """Read and send as much as is possible now, and register the pipes to wait for with `poll`.

        Returns:
            "exit" if all results are there or the program has closed its pipe, "output" if the results are too long,
            else "".
        """
        ended = self._read()
        while self._sent < len(self._calls) and self._sent <= self._answered:
            self._unsent += self._calls[self._sent].encode() + b"\n"
            self._sent += 1
        if self._unsent and not ended:
            try:
                self._unsent = self._unsent[os.write(self._requests, self._unsent) :]
            except BlockingIOError:
                pass
            except BrokenPipeError:
                self._sent, self._unsent = len(self._calls), b""
        poll.register(self._replies, select.POLLIN)
        if self._unsent:
            poll.register(self._requests, select.POLLOUT)
        elif self._polled:
            poll.unregister(self._requests)
        self._polled = bool(self._unsent)
        return ended

    def run(self) -> None:
        """Run steps until the end, without a time limit."""
        poll = select.poll()
        while not self.step(poll):
            poll.poll()

    def _read(self) -> str:
        while self._answered < len(self._calls):
            try:
                piece = os.read(self._replies, CHUNK)
            except BlockingIOError:
                return ""
            if not piece:
                break
            self._kept += len(piece)
            if self._kept > values.MAX_FRAME:
                return "output"
            self._keep(piece)
            self._answered += piece.count(b"\n")
        return "exit"
