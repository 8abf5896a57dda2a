"""One episode on the run's side: requests to its process (`host.py`), and what becomes of one that fails."""

import asyncio
import copy
import itertools
import logging
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

from pipeline.agent import Content, EpisodeOver, Message, Observation, frames
from pipeline.agent.errors import CommandFailed, EpisodeFailed, EpisodeLost, PolicyMistake
from pipeline.agent.questions import Asked, Chat, ChatFailed, Questions, Send, as_fields
from pipeline.agent.replies import Returned, checked, checked_content, checked_result
from pipeline.agent.schema import mistake, whole
from pipeline.agent.zygote import Loaded, Zygote, ZygoteLost

log = logging.getLogger(__name__)

CLOSE_S = 5.0  # seconds in which an environment's `close` must be done
EXIT_S = 3.0  # seconds until the zygote reports a process whose connection has ended
PLACE_S = 2.0
"""Seconds in which a process that is late must tell where it is."""
PLACE = 300
"""Characters of that."""
_READ = 1 << 16
Asking = Callable[[Send], AbstractAsyncContextManager[Asked]]


class Session:
    """One episode: the handle of its process. Requests are answered one after the other.

    Args:
        zygote: starts the process.
        number: of the process.
        loaded: what the user's files hold.
        further: episodes that the process may serve after this one.
        keep: takes the session when it has ended and its process may serve another one.

    Raises:
        OSError: (when made) there is no descriptor for its connection.
        ZygoteLost: (when made) the zygote has ended.
    """

    def __init__(
        self, zygote: Zygote, number: int, loaded: Loaded, further: int, keep: Callable[["Session"], None]
    ) -> None:
        self.opened: Content = None
        """What the environment's `open` returned."""
        self.found_room = True
        """Whether the machine could start its process, as far as is known."""
        self.closing: asyncio.Task[None] | None = None
        """Ends the episode, from `close` on."""
        self.fresh = True
        """Whether the process has served no other episode."""
        self._further, self._keep = further, keep
        self._zygote = zygote
        self._number = number
        self._loaded = loaded
        self._schemas = {schema["function"]["name"]: schema for schema in loaded.tools}
        self._failed: str | None = None  # why it answers no further requests
        self._dead = False
        self._torn = 0  # frames that were not sent to their end
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
        """Begin the episode; `Processes.open` does."""
        reply = await self._ask("open", "open", timeout_s, row=row, seed=seed)
        self.opened = self._checked(lambda: checked_content(reply.get("opened"), "open"))

    async def step(self, message: Message, timeout_s: float) -> Observation:
        """What the environment answers to a message.

        Raises:
            EpisodeFailed: it raised, ended, was late, or returned what an observation cannot hold.
        """
        reply = await self._ask("step", "step", timeout_s, message=as_fields(message))
        reply.pop("id")
        return self._checked(lambda: Observation(**checked(Observation(**reply), "step")))

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """What a tool returns, as text.

        Raises:
            PolicyMistake: there is no such tool, the arguments do not fit, or the tool raised `ToolError`.
            EpisodeFailed: the tool raised anything else, ended the process, or was late.
        """
        if name not in self._schemas:
            raise PolicyMistake(f"there is no tool {name!r:.80}; the tools are: {', '.join(self._schemas) or 'none'}")
        # A server's schema may have many forms, and an answer many values, for each of which all are tried.
        problem = await asyncio.to_thread(mistake, self._schemas[name], arguments)
        if problem is not None:
            raise PolicyMistake(problem)
        arguments = whole(self._schemas[name]["function"].get("parameters"), arguments)
        reply = await self._ask("call", f"tool {name}", timeout_s, name=name, arguments=arguments)
        if "mistake" in reply:
            raise PolicyMistake(str(reply["mistake"]))
        return str(reply.get("text"))

    async def run(self, row: dict[str, Any], chat: Chat) -> Returned:
        """What the program of the episode returns.

        Args:
            row: as in `Processes.open`.
            chat: gives the answers that the program asks for; what it raises, but for `EpisodeOver`, is raised here.

        Raises:
            EpisodeOver: the program let it pass.
            EpisodeFailed: it raised anything else, ended, or returned what is no reward.
        """
        try:
            return await self.drive(row, lambda send: Questions(chat, send))
        except ChatFailed as failed:
            raise failed.error from None

    async def drive(self, row: dict[str, Any], asked: Asking) -> Returned:
        """The same, where `asked` makes what takes the program's questions."""
        reply = await self._ask("run", "the program", None, asked, row=row)
        if "over" in reply:
            raise EpisodeOver(str(reply["over"]))
        return self._returned(reply)

    def _returned(self, reply: dict[str, Any]) -> Returned:
        reply.pop("id", None)
        return self._checked(lambda: checked_result(Returned(**reply), "the program"))

    async def command(self, row: dict[str, Any], variables: dict[str, str]) -> Returned:
        """What the command of the episode printed at its end, or a program with a client returned.

        Args:
            row: as in `Processes.open`.
            variables: further environment variables of the command.

        Raises:
            CommandFailed: it ended with an exit code other than 0, or raised.
            EpisodeFailed: it printed what is no reward.
        """
        reply = await self._ask("command", "the program", None, row=row, variables=variables)
        if "failed" in reply:
            raise CommandFailed(str(reply["failed"]))
        return self._returned(reply)

    async def place(self) -> str:
        """Where the process is that has not answered, such as ` (my_program.py, line 12)`; "" if it does not tell."""
        return "" if self._dead else await self._place()

    async def close(self, well: bool = False) -> None:
        """End the episode in the background: the environment's `close` has `CLOSE_S`, then its process is killed.

        Args:
            well: whether the episode came to its end, so that its process may serve another one.
        """
        if self.closing is None:
            self.closing = asyncio.create_task(self._close(well and self._failed is None and self._further > 0))

    @property
    def is_there(self) -> bool:
        """Whether the process has not ended, as far as is known."""
        return not self._ended.done()

    def following(self) -> "Session":
        """Another episode in the process of this one, which has ended well."""
        session = copy.copy(self)
        session.opened, session.closing, session._failed, session._asking = None, None, None, asyncio.Lock()
        session.fresh, session._further = False, self._further - 1
        self._dead = True
        return session

    def when_ended(self, tell: Callable[["Session"], None]) -> None:
        """Have `tell` called when the process has ended."""
        self._ended.add_done_callback(lambda _: tell(self))

    def kill(self) -> None:
        """Kill the process and what it started."""
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
        """The answer to a request.

        Args:
            what: names the request in errors.
            timeout_s: seconds until it must be there; None leaves that to the caller.
            asked: makes what takes the questions that the process asks meanwhile.
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
        """What the process sent, checked once more: its code is the user's."""
        try:
            return make()
        except (ValueError, TypeError) as error:
            raise self._fail(f"ValueError: {error}") from None

    async def _exchange(self, number: int, request: dict[str, Any], asked: Asking | None = None) -> dict[str, Any]:
        """Send a request and read its answer; an answer to a request that was cancelled is passed over.

        Raises:
            EOFError, OSError: the connection ended.
            ValueError: the request or the answer is no frame.
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
            # asyncio's own loop does not turn if something is there, and a process may send without an end.
            await asyncio.sleep(0)

    async def _place(self) -> str:
        """Where the process is, which has not answered in time; "" if it does not tell."""
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
        """How the process ended, whose connection has, and the error that this is."""
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_S):
                end = await asyncio.shield(self._ended)
            self.found_room = end.started
            return end.words, EpisodeLost if end.lost else EpisodeFailed
        return "its process closed its connection", EpisodeFailed
