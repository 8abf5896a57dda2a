"""The calls of a test, sent to the program's process one at a time, and its answers.

A call is sent when the one before has been answered. So a program knows no later call while it can still choose an
answer, and the next call does not depend on any answer. Answers are lines, one for each call in order; they are not
read here.
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
    """The near ends of the two pipes between a program and its test."""

    def __init__(self, calls: Sequence[str], requests: int, replies: int, keep: Callable[[bytes], object]) -> None:
        """Store the calls and the ends of the pipes.

        Args:
            calls: each as a line of JSON (see `driver.py`).
            requests, replies: the file descriptors to write to and to read from.
            keep: takes the answers, in pieces.
        """
        self._calls, self._requests, self._replies, self._keep = calls, requests, replies, keep
        self._sent = self._answered = self._kept = 0
        self._unsent, self._polled = b"", False
        for fd in (requests, replies):
            os.set_blocking(fd, False)  # the program need not read, nor write

    def step(self, poll: select.poll) -> str:
        """Read and send as much as is possible now, and register further waits with `poll`.

        Returns:
            "exit" once every call is answered or the program answers no more, "output" if its answers are too long, and
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
        """Run all steps, without a limit on time."""
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
