"""Makes standard output and standard error survive the loss of their reader while a command runs.

The reader of a pipe ends (`| tee` at Ctrl-C, `| head`), a terminal closes, the disk of a redirected log fills up: an
error of such a write would end a run of days. Text that cannot be written is dropped. `console.log` in a run's folder
has all lines.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)
"""Values of `errno` after which no later write can succeed; after other errors, such as a full disk, it may."""


class Lasting:
    """A text stream that drops text that cannot be written; in all else it behaves like the wrapped stream."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.problem: str | None = None
        """Error message if lines are missing although the file still exists; else None."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        self._try(lambda: self._stream.writelines(lines))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def close_quietly(self) -> None:
        """Flush the stream. Text that cannot be written is dropped, as it would change the interpreter's exit code."""
        self.flush()
        if self.problem is not None:
            self._let_go()

    def _try(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except OSError as error:
            if error.errno in GONE:
                self._let_go()
            else:
                self.problem = error.strerror or str(error)

    def _let_go(self) -> None:
        """Redirect the stream's descriptor to the null device, for buffered text and for later output of any code."""
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            self._stream.flush()
        except (OSError, ValueError):
            # A stream without a file of its own, or no free descriptor: its writes are still dropped.
            return


@contextmanager
def lasting() -> Iterator[None]:
    """Make `sys.stdout` and `sys.stderr` drop what they cannot write while the block runs."""
    before = sys.stdout, sys.stderr
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # It was closed at the start. Without a file here, the next opened file would take its number.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for the rest of the process)
    streams = Lasting(sys.stdout), Lasting(sys.stderr)
    sys.stdout, sys.stderr = cast(TextIO, streams[0]), cast(TextIO, streams[1])
    try:
        yield
    finally:
        streams[0].flush()
        if streams[0].problem is not None:
            print(f"standard output is incomplete: {streams[0].problem}", file=sys.stderr)
        for stream in streams:
            stream.close_quietly()
        sys.stdout, sys.stderr = before
