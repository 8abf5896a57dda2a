"""Serves, in the run's process, the chats (requests for a turn) that a program sends as frames (`chat_client.py`)."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from pipeline.agent.endpoint.messages import checked_messages, checked_tools
from pipeline.agent.inside.chat_client import MAX_CHATS
from pipeline.agent.inside.interface import EpisodeOver, Message
from pipeline.agent.tokens.context import Answer

ChatHandler = Callable[..., Awaitable[Answer]]
"""Type of `Conversation.chat`, which generates the policy's turn after a program's messages."""
Send = Callable[[dict[str, Any]], Awaitable[None]]
"""A function that sends a reply to the program, as one frame."""


class FrameReceiver(Protocol):
    """A receiver of a program's frames: `ChatServer`, or an object that forwards them."""

    async def take(self, frame: dict[str, Any]) -> None:
        """See `ChatServer.take`."""


class ChatFailed(Exception):
    """A chat raised `error`, and the program cannot do anything about it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class ChatServer:
    """The server of the chats of one program, which arrive as frames.

        async with ChatServer(chat, send) as questions:
            await questions.take(frame)

    If a chat raises, the block ends and raises `ChatFailed` with the error. When the block ends, all chats end.

    Args:
        chat: `chat` of the episode's conversation.
        send: function that sends a reply as one frame.
    """

    def __init__(self, chat: ChatHandler, send: Send) -> None:
        self._chat, self._send = chat, send
        self._sending = asyncio.Lock()
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: dict[int, asyncio.Task[Answer]] = {}

    async def __aenter__(self) -> "ChatServer":
        await self._group.__aenter__()
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for task in list(self._tasks):
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            chats = (each for each in group.exceptions if isinstance(each, ChatFailed))
            raise next(chats, group.exceptions[0]) from None

    async def take(self, frame: dict[str, Any]) -> None:
        """Start the chat that a frame requests, or cancel the chat that it names."""
        number = frame["chat"]
        if "cancel" in frame:
            if number in self._asking:
                self._asking[number].cancel()
            return
        while len(self._tasks) >= MAX_CHATS:
            # A program that uses `chat_client.ChatClient` does not send more; any other has to wait.
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        task = self._group.create_task(self._answer(number, frame))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, frame: dict[str, Any]) -> None:
        try:
            messages, tools = checked_messages(frame.get("messages")), checked_tools(frame.get("tools"))
        except ValueError as mistake:
            return await self._reply({"chat": number, "mistake": str(mistake)})
        asking = self._asking[number] = asyncio.ensure_future(self._chat(messages, tools))
        try:
            answer = await asking
        except EpisodeOver as over:
            return await self._reply({"chat": number, "over": str(over)})
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if own is None or own.cancelling():
                raise
            # The program has cancelled the chat, and does not wait for a turn.
            return None
        except Exception as error:
            raise ChatFailed(error) from error
        finally:
            self._asking.pop(number, None)
        await self._reply({"chat": number, "answer": as_fields(answer.message)})

    async def _reply(self, reply: dict[str, Any]) -> None:
        async with self._sending:
            await self._send(reply)


def as_fields(message: Message) -> dict[str, Any]:
    """Convert a message to a dict for a frame."""
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.calls]
    return {"text": message.text, "reasoning": message.reasoning, "truncated": message.truncated, "calls": calls}
