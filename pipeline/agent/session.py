"""Handle of one episode in the run: sends requests to the process (`inside/main.py`), and turns failures into
errors."""

import asyncio
import copy
import itertools
import logging
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

from pipeline.agent.arguments import mistake, whole
from pipeline.agent.endpoint.chat_server import ChatFailed, ChatHandler, ChatServer, FrameReceiver, Send, as_fields
from pipeline.agent.errors import CommandFailed, EpisodeFailed, EpisodeLost, PolicyMistake
from pipeline.agent.inside import frames
from pipeline.agent.inside.checks import (
    ProgramResult,
    checked,
    checked_content,
    checked_images,
    checked_result,
    checked_tool,
)
from pipeline.agent.inside.interface import Content, EpisodeOver, Message, Observation, ToolResult
from pipeline.agent.zygote import LoadedCode, ZygoteHandle, ZygoteLost

log = logging.getLogger(__name__)

CLOSE_S = 5.0  # seconds in which an environment's `close` must be done
EXIT_S = 3.0  # seconds until the zygote reports a process whose connection has ended
PLACE_S = 2.0
"""Seconds in which a process past its deadline must report the file and line at which it is."""
PLACE = 300
"""Maximum length of that report, in characters."""
_READ = 1 << 16
Asking = Callable[[Send], AbstractAsyncContextManager[FrameReceiver]]


class Session:
    """One episode: the handle of its process, which handles one request after the other.

    Args:
        zygote: handle of the zygote, which starts the process.
        number: number of the process.
        loaded: the loaded user code.
        further: number of episodes that the process may serve after this one.
        keep: function that takes the session when it has ended and its process may serve another one.

    Raises:
        OSError: (when made) no descriptor is left for the connection.
        ZygoteLost: (when made) the zygote has ended.
    """

    def __init__(
        self, zygote: ZygoteHandle, number: int, loaded: LoadedCode, further: int, keep: Callable[["Session"], None]
    ) -> None:
        self.opened: Content = None
        """Content that the environment's `reset` returned."""
        self.opened_images: list[str] = []
        """Images in this content, in base64."""
        self.found_room = True
        """False if the process could not be started because the operating system had no resources left for it."""
        self.closing: asyncio.Task[None] | None = None
        """The task that ends the episode; None before `close`."""
        self.fresh = True
        """False if the process has served another episode."""
        self._further, self._keep = further, keep
        self._zygote = zygote
        self._number = number
        self._loaded = loaded
        self._schemas = {schema["function"]["name"]: schema for schema in loaded.tools}
        self._failed: str | None = None  # reason if the session takes no further requests
        self._dead = False
        self._torn = 0  # number of frames that were sent in part
        self._asking = asyncio.Lock()
        self._ids = itertools.count()
        self._inbox = bytearray()
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        try:
            self._ended = zygote.open(number, theirs)
        except ZygoteLost:
            self._socket.close()
            raise

    async def open(self, row: dict[str, Any], seed: int, timeout_s: float) -> None:
        """Begin the episode; called by `Processes.open`."""
        reply = await self._ask("reset", "reset", timeout_s, row=row, seed=seed)
        self.opened = self._checked(lambda: checked_content(reply.get("opened"), "reset"))
        self.opened_images = self._checked(lambda: checked_images(reply.get("images", []), "reset"))

    async def step(self, message: Message, timeout_s: float) -> Observation:
        """Send the environment a message of the policy and return the observation.

        Raises:
            EpisodeFailed: the environment raised, ended, missed its deadline, or returned a malformed observation.
        """
        reply = await self._ask("step", "step", timeout_s, message=as_fields(message))
        reply.pop("id")
        return self._checked(lambda: Observation(**checked(Observation(**reply), "step")))

    async def call(
        self, name: str, arguments: dict[str, Any], timeout_s: float, images: bool = False
    ) -> str | ToolResult:
        """Call a tool and return its result: text, or a `ToolResult` whose images are in base64.

        With `images` false, a result that has a text without images is this text.

        Raises:
            PolicyMistake: the tool does not exist, the arguments do not fit, or the tool raised `ToolError`.
            EpisodeFailed: the tool raised anything else, ended the process, or missed its deadline.
        """
        if name not in self._schemas:
            raise PolicyMistake(f"there is no tool {name!r:.80}; the tools are: {', '.join(self._schemas) or 'none'}")
        # It may take `CHECK_S`.
        problem = await asyncio.to_thread(mistake, self._schemas[name], arguments)
        if problem is not None:
            raise PolicyMistake(problem)
        arguments = whole(self._schemas[name]["function"].get("parameters"), arguments)
        reply = await self._ask("call", f"tool {name}", timeout_s, name=name, arguments=arguments, images=images)
        if "mistake" in reply:
            raise PolicyMistake(str(reply["mistake"]))
        text = str(reply.get("text"))
        if not reply.get("images"):
            return text
        made = ToolResult(text, reply["images"])
        return ToolResult(**self._checked(lambda: checked_tool(made, f"tool {name}")))

    async def run(self, row: dict[str, Any], chat: ChatHandler) -> ProgramResult:
        """Run the program of the episode and return its result.

        Args:
            row: row of the episode, as in `Processes.open`.
            chat: function that generates the turns for the program. Its exceptions other than `EpisodeOver` propagate.

        Raises:
            EpisodeOver: the program did not catch it.
            EpisodeFailed: the program raised anything else, ended, or returned a malformed result.
        """
        try:
            return await self.drive(row, lambda send: ChatServer(chat, send))
        except ChatFailed as failed:
            raise failed.error from None

    async def drive(self, row: dict[str, Any], asked: Asking) -> ProgramResult:
        """Run the program like `run`, but with another receiver of the questions (frames) that the program sends.

        Args:
            row: row of the episode, as in `Processes.open`.
            asked: function that makes the receiver; it gets the function that sends the program a frame.
        """
        reply = await self._ask("run", "the program", None, asked, row=row)
        if "over" in reply:
            raise EpisodeOver(str(reply["over"]))
        return self._returned(reply)

    def _returned(self, reply: dict[str, Any]) -> ProgramResult:
        reply.pop("id", None)
        return self._checked(lambda: checked_result(ProgramResult(**reply), "the program"))

    async def command(self, row: dict[str, Any], variables: dict[str, str]) -> ProgramResult:
        """Run the command of the episode, or its program with a client, and return the result.

        Args:
            row: row of the episode, as in `Processes.open`.
            variables: further environment variables of the command or the client.

        Raises:
            CommandFailed: the command did not start or ended with an exit code other than 0, or the program raised.
            EpisodeFailed: the result is malformed.
        """
        reply = await self._ask("command", "the program", None, row=row, variables=variables)
        if "failed" in reply:
            raise CommandFailed(str(reply["failed"]))
        return self._returned(reply)

    async def place(self) -> str:
        """Return the file and line at which a process past its deadline is, such as ` (my_program.py, line 12)`.

        Returns "" if the process does not report them.
        """
        return "" if self._dead else await self._place()

    async def close(self, well: bool = False) -> None:
        """End the episode in the background: the environment's `close` gets `CLOSE_S` seconds, then its process is
        killed.

        Args:
            well: true if the episode came to its end, so that its process may serve another one.
        """
        if self.closing is None:
            self.closing = asyncio.create_task(self._close(well and self._failed is None and self._further > 0))

    @property
    def is_there(self) -> bool:
        """True unless the process is known to have ended."""
        return not self._ended.done()

    def following(self) -> "Session":
        """Return a session for another episode in the process of this session, which has ended well."""
        session = copy.copy(self)
        session.opened, session.closing, session._failed, session._asking = None, None, None, asyncio.Lock()
        session.opened_images = []
        session.fresh, session._further = False, self._further - 1
        self._dead = True
        return session

    def when_ended(self, tell: Callable[["Session"], None]) -> None:
        """Call `tell` with the session when the process has ended."""
        self._ended.add_done_callback(lambda _: tell(self))

    def kill(self) -> None:
        """Kill the process and its children."""
        if not self._dead:
            self._dead = True
            self._failed = self._failed or "the episode was ended"
            self._zygote.signal(self._number, "kill")
            self._socket.close()

    async def _close(self, again: bool) -> None:
        problem, free = None, False
        try:
            # After an error the state of the environment is unknown.
            if (self._loaded.closes or again) and not self._dead and not self._torn:
                async with asyncio.timeout(CLOSE_S), self._asking:
                    reply = await self._exchange(next(self._ids), {"do": "close"})
                problem = reply.get("error")
                free = again and problem is None and reply.get("free") is True and not self._inbox
        except TimeoutError:
            problem = f"not done after {CLOSE_S:g} s"
        except (OSError, EOFError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            if free:
                self._failed = "the episode was ended"
                self._keep(self)
            else:
                self.kill()
        if problem:
            words = frames.cut(str(problem), frames.MAX_REASON)
            log.warning("the close of an environment failed, and what it holds may be left: %s", words)

    async def _ask(
        self, do: str, what: str, timeout_s: float | None, asked: Asking | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Send a request to the process and return the reply.

        Args:
            do: name of the request.
            what: name of the request in errors.
            timeout_s: seconds until the reply must arrive; None leaves the limit to the caller.
            asked: function that makes the receiver of the questions that the process sends before its reply.
            fields: further fields of the request.

        Raises:
            EpisodeFailed: the process replied with an error, missed the deadline, ended or broke the protocol. The
                session takes no further requests.
        """
        async with self._asking:
            if self._failed is not None:
                raise EpisodeFailed(self._failed)
            number = next(self._ids)
            try:
                async with asyncio.timeout(timeout_s):
                    reply = await self._exchange(number, {"do": do, **fields}, asked)
            except TimeoutError:
                place = await self._place()
                seconds = f"{round(timeout_s or 0, 2):g} s"
                raise self._fail(f"TimeoutError: no answer from {what} after {seconds}{place}") from None
            except (OSError, EOFError):
                how, kind = await self._how()
                raise self._fail(f"ProcessError: {how}, in {what}", kind) from None
            except ValueError as error:
                raise self._fail(f"ValueError: between the run and {what} stands {error}") from None
            except asyncio.CancelledError:
                self._failed = "a request of the episode was cancelled"
                raise
        if "error" in reply:
            raise self._fail(str(reply["error"]))
        return reply

    def _fail(self, words: str, kind: type[EpisodeFailed] = EpisodeFailed) -> EpisodeFailed:
        self._failed = words
        self.kill()
        return kind(words)

    def _checked(self, make: Callable[[], Any]) -> Any:
        """Return `make()`, which checks a reply of the process once more, since the user's code could have changed
        it."""
        try:
            return make()
        except (ValueError, TypeError) as error:
            raise self._fail(f"ValueError: {error}") from None

    async def _exchange(self, number: int, request: dict[str, Any], asked: Asking | None = None) -> dict[str, Any]:
        """Send a request and read its reply; replies to earlier, cancelled requests are skipped.

        Raises:
            EOFError, OSError: the connection ended.
            ValueError: the request or the reply is not a frame.
        """
        await self._send({"id": number, **request})
        if asked is None:
            while True:
                reply = await self._receive()
                if reply.get("id") == number:
                    return reply

        async def answer(fields: dict[str, Any]) -> None:
            await self._send({"id": number, **fields})

        async with asked(answer) as questions:
            while "chat" in (reply := await self._receive()):
                if not isinstance(reply["chat"], int):
                    raise ValueError("a chat without a number")
                await questions.take(reply)
        return reply

    async def _send(self, fields: dict[str, Any]) -> None:
        frame = frames.encode(fields)
        self._torn += 1
        await self._loop.sock_sendall(self._socket, frame)
        self._torn -= 1

    async def _receive(self) -> dict[str, Any]:
        size = frames.HEADER.size
        await self._fill(size)
        end = size + frames.length_of(bytes(self._inbox[:size]), frames.MAX_HEARD)
        await self._fill(end)
        body = bytes(self._inbox[size:end])
        del self._inbox[:end]
        return frames.heard(body)

    async def _fill(self, count: int) -> None:
        while len(self._inbox) < count:
            data = await self._loop.sock_recv(self._socket, _READ)
            if not data:
                raise EOFError
            self._inbox += data
            # With data available `sock_recv` does not yield to the loop, and a process may send without an end.
            await asyncio.sleep(0)

    async def _place(self) -> str:
        """Return the file and line that the process past its deadline reports; "" if it reports none."""
        self._zygote.signal(self._number, "late")
        try:
            async with asyncio.timeout(PLACE_S):
                while True:
                    reply = await self._receive()
                    if "late" in reply:
                        return frames.cut(str(reply["late"]), PLACE)
        except (TimeoutError, OSError, EOFError, ValueError):
            return ""

    async def _how(self) -> tuple[str, type[EpisodeFailed]]:
        """Describe how the process of a closed connection ended. Returns (text, class of the error to raise)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_S):
                end = await asyncio.shield(self._ended)
            self.found_room = end.started
            return end.words, EpisodeLost if end.lost else EpisodeFailed
        return "its process closed its connection", EpisodeFailed
