"""The chats of a program that drives its episode: requests to the run, several at once, from the episode's process.

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
"""Chats of one episode that may wait for answers at once; further chats wait until one of them has its answer."""
_READ = 1 << 16


class ChatClient:
    """The chats of one run of the program. It must be made on the event loop of the program.

    Args:
        connection: connection to the run.
        send: function that sends an object.
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
        """Stop reading answers; returns true unless an answer has been read in part."""
        self._loop.remove_reader(self._connection)
        return not self._inbox

    async def chat(
        self, messages: list[dict[str, Any] | Message], tools: list[dict[str, Any]] | None = None
    ) -> Message:
        """Return the answer of the policy; see `pipeline.agent.Chat`."""
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
        """Read frames from the run. The socket is a blocking one, but has something to read."""
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
    """Convert a message to JSON; a `Message` becomes an assistant's message."""
    if not isinstance(message, Message):
        return message
    plain: dict[str, Any] = {"role": "assistant", "content": message.text}
    if message.calls:
        plain["tool_calls"] = [tool_call(call.id, call.name, call.arguments) for call in message.calls]
    return plain


def passed_over(error: BaseException) -> bool:
    """Return whether an exception is `EpisodeOver`, or a group of nothing else."""
    parts = getattr(error, "exceptions", None)
    return isinstance(error, EpisodeOver) or (isinstance(parts, tuple) and all(map(passed_over, parts)))
