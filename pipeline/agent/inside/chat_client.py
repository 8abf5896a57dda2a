"""The client of a program that drives its episode: sends chats from the episode's process to the run, several at once.

Needs Python 3.9 and nothing but the standard library. While the run's request `run` is being answered, frames
(`frames.py`) go both ways:

    {"id": 1, "chat": 0, "messages": [...], "tools": null}      {"id": 1, "chat": 0, "answer": {"text": "31", ...}}
    {"id": 1, "chat": 1, "messages": [], "tools": null}         {"id": 1, "chat": 1, "mistake": "messages must be ..."}
    {"id": 1, "chat": 2, "messages": [...], "tools": null}      {"id": 1, "chat": 2, "over": "the episode is over: ..."}
    {"id": 1, "chat": 3, "cancel": true}                        nothing
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Callable
from typing import Any

from pipeline.agent.inside.forms import tool_call
from pipeline.agent.inside.frames import HEADER, decode, length_of
from pipeline.agent.inside.interface import Call, EpisodeOver, Message

MAX_CHATS = 64
"""Maximum number of chats of one episode that are open at once; further chats wait until one of them is done."""
_READ = 1 << 16


class ChatClient:
    """The client for the chats of one run of the program. Make it on the event loop of the program.

    Args:
        connection: connection to the run.
        send: function that sends an object as one frame.
    """

    def __init__(self, connection: socket.socket, send: Callable[[dict[str, Any]], None]) -> None:
        self._connection, self._send = connection, send
        self._room = asyncio.Semaphore(MAX_CHATS)
        self._ids = itertools.count()
        self._inbox = bytearray()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._receive)

    def close(self) -> bool:
        """Stop reading frames from the run. Returns True unless a frame has been read only in part."""
        self._loop.remove_reader(self._connection)
        return not self._inbox

    async def chat(
        self, messages: list[dict[str, Any] | Message], tools: list[dict[str, Any]] | None = None
    ) -> Message:
        """Let the policy generate a turn after `messages` and return it; see `pipeline.agent.Chat`."""
        number = next(self._ids)
        plain = [_plain(message) for message in messages] if isinstance(messages, list) else messages
        question = {"messages": plain, "tools": tools}
        async with self._room:
            answer = self._waiting[number] = self._loop.create_future()
            try:
                self._send({"chat": number, **question})
                reply = await answer
            except asyncio.CancelledError:
                self._send({"chat": number, "cancel": True})
                raise
            finally:
                del self._waiting[number]
        if "over" in reply:
            raise EpisodeOver(reply["over"])
        if "mistake" in reply:
            raise ValueError(reply["mistake"])
        said = reply["answer"]
        return Message(calls=[Call(**call) for call in said.pop("calls")], **said)

    def _receive(self) -> None:
        """Read frames from the run. The socket is blocking, but this function is only called when there is data."""
        data = self._connection.recv(_READ)
        if not data:
            # The run has ended the episode.
            os._exit(0)
        self._inbox += data
        while len(self._inbox) >= HEADER.size:
            end = HEADER.size + length_of(bytes(self._inbox[: HEADER.size]))
            if len(self._inbox) < end:
                return
            reply = decode(bytes(self._inbox[HEADER.size : end]))
            del self._inbox[:end]
            waiting = self._waiting.get(reply["chat"])
            if waiting is not None and not waiting.done():
                waiting.set_result(reply)


def _plain(message: Any) -> Any:
    """Convert a message to a JSON value; a `Message` becomes an assistant's message."""
    if not isinstance(message, Message):
        return message
    plain: dict[str, Any] = {"role": "assistant", "content": message.text}
    if message.calls:
        plain["tool_calls"] = [tool_call(call.id, call.name, call.arguments) for call in message.calls]
    return plain


def passed_over(error: BaseException) -> bool:
    """Return True if an exception is `EpisodeOver`, or an exception group that contains nothing else."""
    parts = getattr(error, "exceptions", None)
    return isinstance(error, EpisodeOver) or (isinstance(parts, tuple) and all(map(passed_over, parts)))
