"""The run's handle of the zygote, the process from which environment processes are forked (`inside/main.py`)."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.agent.arguments import check_schema
from pipeline.agent.inside import frames
from pipeline.agent.inside.main import END_S, START
from pipeline.agent.inside.remote import MCP, OPENENV
from pipeline.config.agent import AgentConfig

START_S = 120.0  # seconds in which the user's files must be imported
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV")
"""Environment variables that environment processes inherit from the run."""
_PACKAGE = Path(__file__).parent.parent
_MAX_LINE = 1000  # bytes of the last line on standard error
_READ = 1 << 16


@dataclass(frozen=True)
class LoadedCode:
    """A description of the loaded user code."""

    tools: list[dict[str, Any]]
    """JSON schemas of the tools, in OpenAI's form."""
    timeouts: dict[str, float | None]
    """Maximum seconds of one call, by name of the tool; None takes `agent.step_timeout_s`."""
    environment: bool
    """True if the settings name an environment."""
    closes: bool
    """True if the user code has something to close at the end of an episode."""
    forks: bool
    """True if processes are forked; false if each episode starts a fresh interpreter."""
    client: bool = False
    """True if the program has a client of its own (`Code.client`)."""
    note: str = ""
    """A notice for the author of the user's files; "" if there is none."""


class ProcessEnd(NamedTuple):
    """How the process of an episode ended; `words` describes it."""

    words: str
    started: bool = True
    """False if the process was not started because the operating system had no resources left for it."""
    lost: bool = False
    """True if the zygote ended, and with it the processes of all episodes."""


class ZygoteLost(Exception):
    """The zygote has ended; the message describes how."""


class ZygoteHandle:
    """The handle of a keeper process, its zygote, and the episode processes that the zygote forks.

    Raises:
        ValueError: (when made) the interpreter does not start.
    """

    def __init__(self, config: AgentConfig) -> None:
        named = [spec for spec in [config.environment, *config.tools] if spec and spec.startswith((MCP, OPENENV))]
        self._start_s = START_S + config.reset_timeout_s * len(named)  # and the time of each server to answer
        self._python = sys.executable if config.python is None else os.path.expanduser(config.python)
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._ended: dict[int, asyncio.Future[ProcessEnd]] = {}  # end of an episode's process, by its number
        self._outbox: deque[tuple[bytes, socket.socket | None]] = deque()
        self._inbox = bytearray()
        self._mourning: asyncio.Task[None] | None = None
        self.lost: str | None = None
        """How the zygote ended; None while it runs."""
        # The file records errors that occur before the user's files are imported.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._control, control = socket.socketpair()
        self._life, life = socket.socketpair()
        self._control.setblocking(False)
        with control, life, tempfile.TemporaryFile() as settings:
            settings.write(json.dumps(_settings(config)).encode())
            settings.flush()
            given = [settings.fileno(), control.fileno(), life.fileno()]
            command = [self._python, "-c", START, "keep", *map(str, given), str(os.getpid())]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._stderr,
                    pass_fds=given,
                    env=_variables(config.env_vars, os.environ),
                    start_new_session=True,
                )
            except OSError as error:
                for descriptor in (self._control, self._life, self._stderr):
                    descriptor.close()
                raise ValueError(
                    f"agent.python: {self._python} cannot be started ({error.strerror}); name a Python interpreter, "
                    "such as /venvs/games/bin/python"
                ) from None
        self._loop.add_reader(self._control, self._receive)

    async def load(self) -> LoadedCode:
        """Wait until the user's files are imported; returns their description.

        Raises:
            ValueError: the files do not load; the message names the key of the settings.
        """
        try:
            async with asyncio.timeout(self._start_s):
                first = await self._first
        except TimeoutError:
            raise ValueError(f"agent: importing environment and tools took longer than {self._start_s:g} s") from None
        except ZygoteLost as lost:
            raise ValueError(f"agent.python: {self._python}: {lost} as it began{self._last_line()}") from None
        if "refused" in first:
            raise ValueError(first["refused"])
        for schema in first["tools"]:
            try:
                await asyncio.to_thread(check_schema, schema)
            except ValueError as error:
                raise ValueError(f"agent.tools: {error}") from None
        return LoadedCode(**first)

    def _last_line(self) -> str:
        """Return the last line on standard error as a clause; "" if there is none."""
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _MAX_LINE))
        lines = self._stderr.read().decode(errors="replace").strip().split("\n")
        return f"; the last line that it wrote: {lines[-1]}" if lines[-1] else ""

    def open(self, number: int, connection: socket.socket) -> asyncio.Future[ProcessEnd]:
        """Start the process of an episode.

        Args:
            number: number of the process.
            connection: the process's end of the connection, which is closed here once it is sent.

        Returns:
            A future that gets a `ProcessEnd` when the process has ended.

        Raises:
            ZygoteLost: the zygote has ended.
        """
        if self.lost is not None:
            connection.close()
            raise ZygoteLost(self.lost)
        ended = self._ended[number] = self._loop.create_future()
        self._send({"open": number}, connection)
        return ended

    def signal(self, number: int, kind: str) -> None:
        """Signal the process of an episode, unless it has ended.

        Args:
            number: number of the process.
            kind: `kill`, or `late` to make the process report the file and line at which it is.
        """
        if self.lost is None and number in self._ended:
            self._send({"number": number, "signal": kind})

    async def close(self) -> None:
        """Kill the zygote and all episode processes."""
        self._lose("the run ended it")
        self._life.close()
        try:
            await asyncio.to_thread(self._process.wait, 2 * END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, END_S)
        self._stderr.close()

    def _send(self, command: dict[str, Any], connection: socket.socket | None = None) -> None:
        self._outbox.append((frames.encode(command), connection))
        if len(self._outbox) == 1:
            self._flush()

    def _flush(self) -> None:
        """Send as much of the queued commands as the zygote's socket takes now, and the rest when it is writable."""
        while self._outbox:
            frame, connection = self._outbox[0]
            try:
                if connection is None:
                    sent = self._control.send(frame)
                else:
                    sent = socket.send_fds(self._control, [frame], [connection.fileno()])
                    connection.close()
            except BlockingIOError:
                self._loop.add_writer(self._control, self._flush)
                return
            except OSError as error:
                return self._lose(str(error))
            # The descriptor went with the first byte.
            self._outbox[0] = (frame[sent:], None)
            if sent == len(frame):
                self._outbox.popleft()
        self._loop.remove_writer(self._control)

    def _receive(self) -> None:
        """Read the reports that the zygote has sent."""
        try:
            data = self._control.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._control)
            self._mourning = self._loop.create_task(self._mourn())
            return
        self._inbox += data
        try:
            self._take_in()
        except ValueError as error:
            # A thread of the user's files has written to the connection.
            self._process.kill()
            self._lose(f"the process that starts those of episodes sent {error}")

    def _take_in(self) -> None:
        """Handle the complete events in the inbox.

        Raises:
            ValueError: something in the inbox is not a frame.
        """
        size = frames.HEADER.size
        while len(self._inbox) >= size:
            end = size + frames.length_of(bytes(self._inbox[:size]))
            if len(self._inbox) < end:
                return
            event = frames.decode(bytes(self._inbox[size:end]))
            del self._inbox[:end]
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if "ended" not in event:
            if not self._first.done():
                self._first.set_result(event)
            return
        ended = self._ended.pop(event["ended"], None)
        if ended is not None and not ended.done():
            started = "error" not in event
            words = f"its process ended with {_code(event['code'])}" if started else event["error"]
            ended.set_result(ProcessEnd(words, started))

    async def _mourn(self) -> None:
        """Wait for the end of the zygote, after its connection has closed, and record how it ended."""
        how = "closed its connection"
        with suppress(subprocess.TimeoutExpired):
            how = f"ended with {_code(await asyncio.to_thread(self._process.wait, END_S))}"
        self._lose(f"the process that starts those of episodes {how}")

    def _lose(self, how: str) -> None:
        """Record that the zygote has ended, as `how` describes, and end all its episodes with that text."""
        if self.lost is not None:
            return
        self.lost = how
        self._loop.remove_reader(self._control)
        self._loop.remove_writer(self._control)
        self._control.close()
        for _, connection in self._outbox:
            if connection is not None:
                connection.close()
        self._outbox.clear()
        if not self._first.done():
            self._first.set_exception(ZygoteLost(how))
            # Mark the exception as read: no caller may wait for it.
            self._first.exception()
        for ended in self._ended.values():
            if not ended.done():
                ended.set_result(ProcessEnd(how, lost=True))
        self._ended.clear()


def _settings(config: AgentConfig) -> dict[str, Any]:
    """Make the settings that an environment process reads at its start (`main.START`)."""
    return {
        "path": [os.path.abspath(entry) for entry in sys.path] if config.python is None else None,
        "package": str(_PACKAGE),
        "isolation": config.isolation,
        "home": os.path.expanduser("~"),
        "code": {
            "environment": config.environment,
            "kwargs": config.kwargs,
            "tools": config.tools,
            "program": config.program,
            "command": config.command,
            "within_s": config.reset_timeout_s,
        },
    }


def _variables(chosen: dict[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """Choose the environment variables of environment processes: some of the run's, then the `chosen` ones."""
    variables = {name: inherited[name] for name in INHERITED if name in inherited}
    # Hundreds of processes share the cores, and libraries whose import starts threads cannot be forked.
    return {**variables, "OMP_NUM_THREADS": "1", **chosen}


def _code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"
