"""The pool's handle of a reward worker: a process that calls rules and reward functions, so a hanging call can be
killed.

The process runs `program.py`. It is started with `subprocess`, since a child of `multiprocessing.Process` would import
the `__main__` of a Ray worker. The process has its own session, so a kill reaches its children too, and inherits only
one file descriptor, its end of a `multiprocessing` connection.
"""

import json
import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import Any

from pipeline.config.reward import RewardConfig
from pipeline.reward.functions import Function
from pipeline.reward.program import Request
from pipeline.reward.result import MAX_ERROR, Answer, sent_answer
from pipeline.reward.sandbox import processes
from pipeline.reward.sandbox.rule import DATA_SOURCES

log = logging.getLogger(__name__)

MESSAGE_S = 10  # time limit in seconds for a worker to read a message, and to complete one that it has begun to send
LOOK_S = 0.05  # seconds between two checks of a worker's memory
EXIT_S = 0.2  # time limit in seconds for a process to exit after its connection was closed

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from pipeline.reward.program import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


@dataclass(eq=False)
class RewardCall:
    """One call of a reward function: for one row, or for all rows of a chunk if the function takes batches."""

    function: Function
    rows: list[list[Any]]
    """Rows, each a list of columns: data_source, response, and ground_truth and extra_info as JSON or None; for
    episodes also messages as JSON and the number of turns."""
    limit_s: float
    """Time limit of the call, in seconds (wall clock)."""
    answers: "Future[list[Answer]]" = field(default_factory=Future)
    """Gets one result per row."""
    deadline: float = math.inf
    """Time on the monotonic clock by which the result must be there; infinite until the call begins."""
    alone: bool = False
    """True if a worker that gets this call must get no other call at the same time."""

    @property
    def by_rule(self) -> bool:
        """True if a built-in rule is called, not a function of the user."""
        return self.function.path is None

    @property
    def cheap(self) -> bool:
        """True if a worker may get further calls of this kind together with this one."""
        return self.by_rule and not self.alone and self.rows[0][0] not in DATA_SOURCES


class WorkerLost(Exception):
    """Error for a worker that has ended or must be ended. The message becomes the error of its rows without a
    result."""

    def __init__(self, message: str, exhausted: bool = False) -> None:
        super().__init__(message)
        self.exhausted = exhausted  # True if the worker exceeded the CPU budget of a rule, or its memory limit


class RewardWorker:
    """The pool's handle of one worker process."""

    def __init__(self, config: RewardConfig) -> None:
        self.loading = True
        self.asynchronous: list[str] = []  # names of the `async def` functions; known once they are loaded
        self.calls: dict[int, RewardCall] = {}  # calls without a result, by id, in order
        self.began_at = time.monotonic()  # time at which the worker was started, or last got calls
        self.given = 0  # number of calls that it got then
        self._memory_mb, self._looked_at = config.worker_memory_mb, 0.0
        # Holds the worker's error output until the functions are loaded.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self.connection, theirs = Pipe()
        # Without time limits, a worker that does not read, or stops in the middle of an answer, would block the pool.
        with socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", MESSAGE_S, 0))
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, path, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        # `receive` detects a process that has already ended.
        with suppress(WorkerLost):
            self._send(config)

    def begin(self, calls: dict[int, RewardCall]) -> None:
        """Send calls to the worker. The keys are the ids of the calls.

        Raises:
            WorkerLost: the process has ended, or does not read.
        """
        self.calls |= calls
        self._send([Request(number, call.function.name, call.rows, call.limit_s) for number, call in calls.items()])

    def _send(self, content: Any) -> None:
        try:
            self.connection.send(content)
        except OSError:
            raise self.lost() from None

    def receive(self) -> Iterator[tuple[RewardCall, list[Answer]]]:
        """Yield (call, results) for each result that the worker has sent, and remove these calls from `calls`.

        Raises:
            WorkerLost: the process has ended, has stopped in the middle of a message, or has sent something else.
            ValueError: the worker cannot load the functions.
        """
        try:
            while self.connection.poll():
                message = self._read()
                if "refused" in message:
                    raise ValueError(message["refused"])
                if "asynchronous" in message:
                    self.loading, self.asynchronous = False, message["asynchronous"]
                elif message["id"] in self.calls:
                    yield self.calls.pop(message["id"]), message["answers"]
                else:
                    log.warning("a reward function answered a call that its worker does not have; the answer is lost")
        except BlockingIOError:
            stopped = f"stopped in the middle of an answer, for {MESSAGE_S} s"
            raise WorkerLost(f"WorkerError: the process of the reward function {stopped}") from None
        except (EOFError, OSError):
            raise self.lost() from None
        # A fork of the function may hold a copy of the connection open.
        if self.process.poll() is not None and not self.connection.poll():
            raise self.lost()

    def _read(self) -> dict[str, Any]:
        """Read and check the next message. Raises WorkerLost for any other data, which a function may have written to
        the connection."""
        body = self.connection.recv_bytes()
        with suppress(ValueError, TypeError, LookupError, OverflowError, RecursionError):
            message = json.loads(body)
            if not self.loading:
                call = self.calls.get(message["id"])
                answers = [sent_answer(answer) for answer in message["answers"]]
                if call is None or len(answers) == len(call.rows):
                    return {"id": message["id"], "answers": answers}
            elif isinstance(message.get("refused"), str) or isinstance(message.get("asynchronous"), list):
                return dict(message)
        raise WorkerLost("WorkerError: the process of the reward function sent something that is not an answer")

    def check_memory(self, now: float) -> None:
        """Raise `WorkerLost` if the process uses more than `reward.worker_memory_mb`.

        Args:
            now: current time on the monotonic clock; there is at most one check per `LOOK_S` seconds.
        """
        if now < self._looked_at + LOOK_S:
            return
        self._looked_at = now
        held = processes.own_memory(self.process.pid) / 2**20
        if held > self._memory_mb:
            limit = f"reward.worker_memory_mb={self._memory_mb}"
            raise WorkerLost(f"MemoryError: the reward worker holds {held:,.0f} MB, more than {limit}", exhausted=True)

    def lost(self) -> WorkerLost:
        """Return the error for a worker that closed its connection; its text has the exit code or signal."""
        try:
            code = self.process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return WorkerLost("WorkerError: the process of the reward function closed its connection or does not read")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        # SIGPROF comes from the timer of a rule's budget.
        spent = code == -signal.SIGPROF
        return WorkerLost(f"WorkerError: the process of the reward function ended with {how}", exhausted=spent)

    def last_line(self) -> str:
        """Return text with the last line that the process wrote to stderr before it had loaded the functions; "" if it
        wrote nothing."""
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - MAX_ERROR))
        lines = self._stderr.read().decode(errors="replace").strip().split("\n")
        return f"; the last line that it wrote: {lines[-1]}" if lines[-1] else ""

    def kill(self) -> None:
        """Kill the process and all processes in its process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        self.connection.close()
