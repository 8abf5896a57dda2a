"""The loop of an episode's process: it handles the run's requests by calls of the user's code.

This module needs Python 3.9 and nothing but the standard library. Requests and answers are frames (`frames.py`), one
answer for each request, in order:

    {"id": 1, "do": "reset", "row": {...}, "seed": 7}           {"id": 1, "opened": "Guess."}
    {"id": 2, "do": "step", "message": {"text": "31", ...}}     {"id": 2, "content": "lower", "done": false, ...}
    {"id": 3, "do": "call", "name": "calc", "arguments": {}}    {"id": 3, "text": "7"}, or {"id": 3, "mistake": "..."}
    {"id": 4, "do": "close"}                                    {"id": 4, "free": true}
    {"id": 5, "do": "run", "row": {...}}                        {"id": 5, "reward": 1.0, ...}, or {"over": ""}
    {"id": 6, "do": "command", "row": {}, "variables": {}}      {"id": 6, "reward": 1.0, ...}, or {"failed": ""}

and {"id": 2, "error": "ValueError: boom (my_game.py, line 12)"} if the user's code failed. A running program sends its
chats as further frames (`chat_client.py`). After a `close` with `free`, `reset` may begin another episode.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import signal
import socket
import sys
import time
from functools import partial
from types import FrameType
from typing import Any

from pipeline.agent.inside import chat_client, command
from pipeline.agent.inside.checks import checked, checked_content, checked_tool, returned, shown
from pipeline.agent.inside.frames import MAX_HEARD, MAX_TEXT, cut, encode, read, text_of
from pipeline.agent.inside.interface import Call, Environment, Message, Observation, ToolError, ToolResult
from pipeline.agent.inside.load import MAX_ERROR, Code

THREAD_S = 0.2  # seconds until an ended thread is gone
LATE = signal.SIGRTMAX - 1 if sys.platform == "linux" else signal.SIGUSR2
"""Signal on which a process past its deadline reports the file and line at which the user's code is."""


class Replies:
    """The handler of requests in this process, which serves one episode after the other."""

    def __init__(self, connection: socket.socket, code: Code) -> None:
        self._connection = connection
        self._code = code
        self._environment: Environment | None = None
        self._loop: Any = None  # the event loop of `async def` methods; made for the first of them
        self._busy: int | None = None  # the request that the user's code works on
        self._awaited: Any = None  # the coroutine of `async def` code
        self._server = ""  # the server that is being connected
        self._whole = True  # false if a part of a frame has been read
        self._exit_code = 0  # exit code for a fork that the user's code did not end
        self._process = os.getpid()
        # No other process may use the connection: neither a fork nor a program that the user's code starts.
        connection.set_inheritable(False)
        os.register_at_fork(after_in_child=connection.close)
        self._first = _alive()  # threads and children that were there before the first episode
        signal.signal(LATE, self._late)

    def serve(self) -> None:
        """Handle requests until the run closes the connection."""
        while True:
            request = read(self._connection)
            if request is None:
                return
            if "do" not in request:
                # The answer to a chat for which the program did not wait.
                continue
            self._busy = request["id"]
            answer = self._answer(request)
            if os.getpid() != self._process:
                # A fork that the user's code did not end. The episode is its parent's, and so is the connection.
                os._exit(self._exit_code)
            self._busy = None
            self._connection.sendall(answer)

    def _late(self, number: int, frame: FrameType | None) -> None:
        """Send the run the file and line at which the user's code is; the run kills the process afterwards."""
        if self._busy is not None:
            places = [self._code.place(frame)]
            coroutine = self._awaited
            while getattr(coroutine, "cr_frame", None) is not None:
                # Only this frame counts: its callers are the event loop.
                places.append(self._code.place(coroutine.cr_frame))
                coroutine = coroutine.cr_await
            place = next((place for place in reversed(places) if place), self._server)
            self._connection.sendall(encode({"id": self._busy, "late": place}))

    def _answer(self, request: dict[str, Any]) -> bytes:
        number = request["id"]
        try:
            answer = getattr(self, f"_{request['do']}")(request)
        except ToolError as error:
            if request["do"] == "call":
                return encode({"id": number, "mistake": cut(text_of(error), MAX_TEXT)})
            return encode({"id": number, "error": self._code.words(error)})
        # The user's code may raise anything, `SystemExit` included; its row carries the error, which is counted.
        except BaseException as error:  # noqa: BLE001
            self._exit_code = _exit_code(error)
            if request["do"] == "run" and chat_client.passed_over(error):
                return encode({"id": number, "over": cut(text_of(error), MAX_ERROR)})
            return encode({"id": number, "error": self._code.words(error)})
        try:
            return encode({"id": number, **answer}, MAX_HEARD)
        except ValueError as error:
            return encode(
                {"id": number, "error": cut(f"ValueError: {self._name(request)} returned {error}", MAX_ERROR)}
            )

    def _name(self, request: dict[str, Any]) -> str:
        """Return the name, for error messages, of the part of the user's code that handles a request."""
        if request["do"] == "call":
            return f"tool {request['name']}"
        if request["do"] in ("run", "command"):
            return "the program"
        return f"{type(self._environment).__name__}.{request['do']}"

    def _value(self, result: Any) -> Any:
        """Return a method's result; if the method is `async def`, run its coroutine first."""
        if not inspect.isawaitable(result):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
            # A fork that goes back to the event loop would take input for this process.
            os.register_at_fork(after_in_child=partial(self._loop.call_soon, os._exit, 0))

        async def awaited() -> Any:
            return await result

        self._awaited = result
        try:
            return self._loop.run_until_complete(awaited())
        finally:
            self._awaited = None

    def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        seed = request["seed"]
        # All processes come from one, and would draw the same numbers.
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % (1 << 32))
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(seed)
        for tool in self._code.tools.values():
            if tool.episode is not None:
                tool.episode.open(request["row"])
        for server in self._code.servers:
            self._server = f" ({server.name})"
            server.open()
        self._server = ""
        if self._code.environment is None:
            return {"opened": None}
        self._environment = self._code.environment()
        result = self._value(self._environment.reset(request["row"], seed))
        name = f"{type(self._environment).__name__}.reset"
        if not isinstance(result, Observation):
            return {"opened": checked_content(result, name)}
        found = checked(result, name)
        if found["done"] or found["reward"] is not None or found["parts"]:
            raise ValueError(f"{name} returned an Observation with done, reward or parts; only `step` may set them")
        return {"opened": found["content"], "images": found["images"]}

    def _step(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._environment is not None
        message = request["message"]
        calls = [Call(**call) for call in message.pop("calls")]
        result = self._value(self._environment.step(Message(calls=calls, **message)))
        name = f"{type(self._environment).__name__}.step"
        if isinstance(result, str):
            result = Observation(result)
        if not isinstance(result, Observation):
            raise ValueError(f"{name} returned {shown(result)}; expected an Observation or a text")
        return checked(result, name)

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        tool = self._code.tools[request["name"]]
        first = (self._environment,) if tool.method else ()
        result = self._value(tool.function(*first, **request["arguments"]))
        if isinstance(result, str):
            return {"text": cut(result, MAX_TEXT)}
        if isinstance(result, ToolResult):
            if not request.get("images") and isinstance(result.plain, str):
                return {"text": cut(result.plain, MAX_TEXT)}
            return checked_tool(result, self._name(request))
        try:
            # Read back as the text of its JSON, without the header of the frame.
            return {"text": cut(encode(result)[4:].decode(), MAX_TEXT)}
        except ValueError as error:
            raise ValueError(f"{self._name(request)} returned {error}") from None

    def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        number, program = request["id"], self._code.program

        def send(question: dict[str, Any]) -> None:
            frame = encode({"id": number, **question}, MAX_HEARD)
            # A frame must not stand within another one.
            self._busy = None
            self._connection.sendall(frame)
            self._busy = number

        async def run() -> Any:
            assert program is not None
            asking = chat_client.ChatClient(self._connection, send)
            try:
                return await program(request["row"], asking.chat)
            finally:
                self._whole = asking.close()

        return vars(returned(self._value(run()), "the program"))

    def _command(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._code.client:
            return self._client(request)
        printed = command.run(self._code.command, request["row"], request["variables"])
        if "failed" in printed:
            return printed
        return vars(returned(printed.get("result"), "agent.command"))

    def _client(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a program whose client finds the endpoint's URL and key in environment variables."""
        assert self._code.program is not None
        os.environ.update(request["variables"])
        try:
            result = self._value(self._code.program(request["row"]))
        # The endpoint may have refused the client because the episode is over; the run knows.
        except BaseException as error:  # noqa: BLE001
            self._exit_code = _exit_code(error)
            return {"failed": self._code.words(error)}
        return vars(returned(result, "the program"))

    def _close(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._environment is not None:
            closed: Any = self._environment.close()  # type: ignore[func-returns-value]
            self._value(closed)
        for tool in self._code.tools.values():
            if tool.episode is not None:
                self._value(tool.episode.close())
        for server in self._code.servers:
            server.close()
        self._environment = None
        return {"free": self._is_free()}

    def _is_free(self) -> bool:
        """Return True if no thread, child process, task of the event loop, timer or part of a frame is left."""
        tasks = self._loop is not None and asyncio.all_tasks(self._loop)
        timer = any(
            signal.getitimer(kind)[0] for kind in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
        )
        deadline = time.monotonic() + THREAD_S
        while not _alive() <= self._first:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return self._whole and not tasks and not timer


def _exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends because it does not catch this exception."""
    code = error.code if isinstance(error, SystemExit) else 1
    return 0 if code is None else code & 255 if isinstance(code, int) else 1


def children() -> list[int]:
    """List the process ids of the children of this process."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            found += map(int, file.read().split())
    return found


def _alive() -> set[int]:
    """Return the ids of all threads and child processes of this process."""
    return {*map(int, os.listdir("/proc/self/task")), *children()}
