"""A check of an MCP server's messages: the first answer that belongs to no request ends the connection.

The MCP client ignores an answer that it cannot read or that belongs to no request. The call that waits for the answer
would wait until its deadline.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anyio
from mcp_types import JSONRPCError, JSONRPCRequest, JSONRPCResponse

from pipeline.agent.inside.frames import MAX_MESSAGES


class StreamGuard:
    """The requests that wait for an answer on one connection, and the number of messages received.

    Args:
        fail: function that records why the server gives no further answers, as words that follow the server's name.
    """

    def __init__(self, fail: Callable[[str], None]) -> None:
        self.fail = fail
        self.received = 0
        """Number of messages since the last call."""
        self._waiting: set[str] = set()

    def asked(self, message: Any) -> None:
        """Record that a message is sent to the server; if it is a request, its answer is awaited."""
        if isinstance(message, JSONRPCRequest):
            self._waiting.add(str(message.id))

    def answers(self, item: Any) -> bool:
        """Return True if the client can use a message of the server; if not, call `fail`."""
        self.received += 1
        if self.received > MAX_MESSAGES:
            self.fail(f"sent more than {MAX_MESSAGES:,} messages")
            return False
        if isinstance(item, Exception):
            self.fail(f"sent a message that cannot be read: {item!s:.300}")
            return False
        message = item.message
        if isinstance(message, (JSONRPCResponse, JSONRPCError)):
            if str(message.id) not in self._waiting:
                why = f": {message.error.message:.300}" if isinstance(message, JSONRPCError) else ""
                self.fail(f"answered a request that was not made, of the id {message.id!r:.80}{why}")
                return False
            self._waiting.discard(str(message.id))
        return True


def is_meant(line: bytes) -> bool:
    """Return True if a line that cannot be parsed was meant as a message; servers print other text, too."""
    if not line.lstrip().startswith((b"{", b"[")):
        return False
    if b'"jsonrpc"' in line:
        return True
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line.lstrip().startswith(b'{"')
    return isinstance(value, dict) and "id" in value and not value.keys().isdisjoint(("result", "error"))


class ReadStream:
    """The stream of messages from a server, checked by the guard."""

    def __init__(self, stream: Any, watch: StreamGuard) -> None:
        self._stream, self._watch = stream, watch

    @property
    def last_context(self) -> Any:
        """See `mcp.shared._stream_protocols.ReadStream`."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        """Receive the next message."""
        item = await self._stream.receive()
        if not self._watch.answers(item):
            raise anyio.EndOfStream
        return item

    async def aclose(self) -> None:
        """Stop receiving."""
        await self._stream.aclose()

    def __aiter__(self) -> ReadStream:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> ReadStream:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.aclose()


class WriteStream:
    """The stream of messages to a server, recorded by the guard."""

    def __init__(self, stream: Any, watch: StreamGuard) -> None:
        self._stream, self._watch = stream, watch

    async def send(self, item: Any, /) -> None:
        """Send a message."""
        self._watch.asked(item.message)
        await self._stream.send(item)

    async def aclose(self) -> None:
        """Stop sending."""
        await self._stream.aclose()

    async def __aenter__(self) -> WriteStream:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.aclose()
