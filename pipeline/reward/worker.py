"""One reward worker: a process that makes calls of rules and reward functions, so that a call that hangs can be killed.

The process runs `program.py`. It is started by `subprocess` and not by `multiprocessing.Process`, whose child would
import the `__main__` of a Ray worker. It has a session of its own, so a kill reaches its children too, and it inherits
no descriptor but its end of a `multiprocessing` connection.
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

MESSAGE_S = 10  # seconds in which a worker must read a message, and end one that it has begun
LOOK_S = 0.05  # seconds between two looks at a worker's memory
EXIT_S = 0.2  # seconds that a process whose connection has ended may take to end itself

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from pipeline.reward.program import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


@dataclass(eq=False)
class RewardCall:
    """One call of a function: for one row, or for all rows of a chunk if the function takes batches."""

    function: Function
    rows: list[list[Any]]
    """The rows: data_source, response, and ground_truth and extra_info as JSON or None; for an episode, also messages
    as JSON and the number of turns."""
    limit_s: float
    """Wall-clock seconds that the call may take."""
    answers: "Future[list[Answer]]" = field(default_factory=Future)
    deadline: float = math.inf
    """Time by which the call must be answered; set when it begins."""
    alone: bool = False
    """True if the worker gets no other call at the same time."""

    @property
    def by_rule(self) -> bool:
        """True if the function is a rule, not the user's."""
        return self.function.path is None

    @property
    def cheap(self) -> bool:
        """True if a worker may get other rows together with this one."""
        return self.by_rule and not self.alone and self.rows[0][0] not in DATA_SOURCES


class WorkerLost(Exception):
    """Error of a worker that has ended or must be ended. The message becomes the error of its unanswered rows."""

    def __init__(self, message: str, exhausted: bool = False) -> None:
        super().__init__(message)
        self.exhausted = exhausted  # whether it spent the CPU time of a rule's budget, or held too much memory


class RewardWorker:
    """The pool's handle of one worker process."""

    def __init__(self, config: RewardConfig) -> None:
        self.loading = True
        self.asynchronous: list[str] = []  # names of the `async def` functions; known once it has loaded them
        self.calls: dict[int, RewardCall] = {}  # calls that it has not answered, by their ids, in order
        self.began_at = time.monotonic()  # when it was started, or last given calls
        self.given = 0  # how many it was given then
        self._memory_mb, self._looked_at = config.worker_memory_mb, 0.0
        # It records errors that occur before the functions are loaded.
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
        """Hand over calls with their ids.

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
        """Yield the calls answered since the last look, with their answers; they no longer belong to the worker.

        Raises:
            WorkerLost: the process has ended, has stopped in the middle of an answer, or has sent something else.
            ValueError: it cannot load the functions.
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
        """Read the next message. A function may have written to the connection, so the message may be foreign."""
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
        """Raise `WorkerLost` if the process holds too much memory; checks at most every `LOOK_S`."""
        if now < self._looked_at + LOOK_S:
            return
        self._looked_at = now
        held = processes.own_memory(self.process.pid) / 2**20
        if held > self._memory_mb:
            limit = f"reward.worker_memory_mb={self._memory_mb}"
            raise WorkerLost(f"MemoryError: the reward worker holds {held:,.0f} MB, more than {limit}", exhausted=True)

    def lost(self) -> WorkerLost:
        """Return an error with the end of the process."""
        try:
            code = self.process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return WorkerLost("WorkerError: the process of the reward function closed its connection or does not read")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        # SIGPROF comes from the timer of a rule's budget.
        spent = code == -signal.SIGPROF
        return WorkerLost(f"WorkerError: the process of the reward function ended with {how}", exhausted=spent)

    def last_line(self) -> str:
        """Return a clause with the last line on standard error before the functions were loaded, if any."""
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - MAX_ERROR))
        lines = self._stderr.read().decode(errors="replace").strip().split("\n")
        return f"; the last line that it wrote: {lines[-1]}" if lines[-1] else ""

    def kill(self) -> None:
        """Kill the process and all that it started, except processes that left its process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        self.connection.close()
