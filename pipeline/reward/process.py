"""One lane, seen from the process that uses it: how it is started, what comes out of it, how it ends."""

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.reward.lane import FLOAT32_MAX, LENGTH, MAX_ERROR, MAX_PARTS, Answer, Row, frame

MAX_FRAME = 64 << 20
"""Bytes of an answer; no honest one of a chunk is longer."""
EXIT_S = 0.2
"""Seconds that a process whose connection has ended may take to end itself."""

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from pipeline.reward.lane import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


@dataclass(frozen=True)
class Call:
    """One call of a function: for one row, or for all rows of a chunk where it takes batches."""

    function: str
    rows: list[Row]
    limit_s: float
    """Seconds it may take."""


@dataclass
class Job:
    """A call on its way."""

    call: Call
    answers: "asyncio.Future[list[Answer]]"
    deadline: float = math.inf


class Owner(Protocol):
    """Who is told what a lane does."""

    def received(self, lane: "Lane", content: Any) -> None: ...

    def ended(self, lane: "Lane", reason: str) -> None: ...


class Lane(asyncio.Protocol):
    """One process that runs `lane.py`.

    Args:
        owner: told of every frame, and of the end; both in the event loop's thread.
        settings: what the process is to load.
        shared: whether it is for `async def` functions.
        now: the time on the owner's clock.
    """

    def __init__(self, owner: Owner, settings: Any, shared: bool, now: float) -> None:
        self.ready = False
        """Whether it has loaded the functions."""
        self.shared = shared
        """Whether it serves `async def` functions, many calls at once."""
        self.jobs: dict[int, deque[Job]] = {}
        """What it has not answered, by the number of its frame. It works on the first one of each."""
        self.begun_at = self.used_at = now
        self.dead = False
        """Whether the process was seen to have ended; what it wrote before may not have been read yet."""
        self.connecting: asyncio.Task[None] | None = None
        self._owner, self._settings = owner, settings
        self._transport: asyncio.WriteTransport | None = None
        self._bytes = bytearray()
        # Where it writes what goes wrong before it can answer; afterwards it prints into nothing.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._socket, theirs = socket.socketpair()
        with theirs:
            path = json.dumps([os.path.abspath(entry) for entry in sys.path])
            # Descriptors other than the socket are closed in the process; it can hold none of Ray's connections open.
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, path, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def free(self) -> bool:
        """Whether it waits for a plain call."""
        return self.ready and not self.shared and not self.jobs

    async def connect(self) -> None:
        """Hand the settings over."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._socket)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self.send(self._settings)

    def last_words(self) -> str:
        """The last line that was written to standard error before the functions were loaded."""
        end = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, end - MAX_ERROR))
        lines = self._said.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def send(self, content: Any) -> None:
        """Write a frame; it is kept until the process reads it."""
        assert self._transport is not None
        self._transport.write(frame(content))

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        try:
            while len(self._bytes) >= LENGTH.size:
                (count,) = LENGTH.unpack_from(self._bytes)
                if count > MAX_FRAME:
                    raise ValueError(f"an answer of {count} bytes")
                if len(self._bytes) < LENGTH.size + count:
                    return
                content = json.loads(self._bytes[LENGTH.size : LENGTH.size + count])
                del self._bytes[: LENGTH.size + count]
                self._owner.received(self, content)
        # Only the function itself can have written this into the lane's socket.
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._owner.ended(self, f"LaneError: the reward function wrote to the connection of its process ({error})")

    def connection_lost(self, error: Exception | None) -> None:
        try:
            code = self.process.wait(timeout=EXIT_S)
        except subprocess.TimeoutExpired:
            self._owner.ended(self, "LaneError: the reward function closed the connection of its process")
        else:
            self._owner.ended(self, ending(code))

    def kill(self) -> None:
        """End the process and all that it started, save what left its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self._transport is not None:
            self._transport.abort()


def trusted(answers: Any, count: int) -> list[Answer]:
    """Answers for `count` rows as they came from a lane, if they are what they should be.

    Raises:
        ValueError, TypeError: they are not.
    """
    if not isinstance(answers, list) or len(answers) != count:
        raise ValueError("an answer for other rows")
    found: list[Answer] = []
    for score, parts, error in answers:
        if error is not None:
            found.append((0.0, "{}", str(error)[:MAX_ERROR]))
            continue
        if not math.isfinite(score) or abs(score) > FLOAT32_MAX or not isinstance(parts, str) or len(parts) > MAX_PARTS:
            raise ValueError("an answer that is no score")
        found.append((float(score), parts, None))
    return found


def ending(code: int) -> str:
    """How a process ended, from what `Popen` calls its return code."""
    how = f"exit code {code}"
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        how = f"signal {names.get(-code, -code)}"
    return f"LaneError: the process of the reward function ended with {how}"
