"""MCP servers that provide tools, used from the process of an episode: `agent.tools=["mcp: COMMAND or URL"]`.

This module needs the package `mcp`, from version 2 on, in the interpreter of the episodes; `load.py` imports it if the
settings name a server. Each episode has its own connection and, for a command, its own server process, which ends with
the episode. The client runs on an event loop in a thread, so that it handles the server's messages between calls, too.

The output of a server is limited to `LIMIT` bytes for one line, for all output after one call, and for one HTTP
response. The number of lines is limited, too: millions of short ones take many seconds. A message that cannot be read
as an answer ends the connection at once (`mcp_streams.py`).

The deadlines of the episode hold: after one has passed, the process is killed, and the server with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import httpx2
import mcp_types
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from pipeline.agent.inside.frames import MAX_FRAME, MAX_TOOLS, MAX_VALUES
from pipeline.agent.inside.interface import ToolError, ToolResult
from pipeline.agent.inside.mcp_streams import ReadStream, StreamGuard, WriteStream, is_meant
from pipeline.agent.inside.remote import ServerFailed, cause, without_login
from pipeline.agent.inside.schema import NAME

LIMIT = MAX_FRAME
END_S = 1.0  # seconds in which a server must end by itself after its input is closed
_MAX_LINE = 500  # bytes of the last line on standard error
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Server:
    """The MCP server of one entry of `agent.tools`, and in the process of an episode the connection to it.

    Args:
        key: key of the entry, for error messages.
        text: a command or an http(s) URL.

    Raises:
        ValueError: the text is neither, or the program is not found.
    """

    def __init__(self, key: str, text: str) -> None:
        self.name = f"the MCP server {without_login(text)!r:.200}"
        self._url = text if re.match(r"https?://", text) else None
        self._command = [] if self._url else _command(key, text)
        self._stack = contextlib.ExitStack()
        self._portal: BlockingPortal
        self._client: Client
        self._problem = ""  # the reason if the server gives no further answers, as far as is known
        self._received = self._lines = 0  # bytes and lines since the last call
        self._watch = StreamGuard(self._fail)

    def schemas(self, within_s: float) -> list[dict[str, Any]]:
        """Connect for a moment, and return the schemas of the server's tools.

        Raises:
            ServerFailed: the server does not answer within `within_s` seconds, or has tools that a model could not
                call, too many tools, or none.
        """
        with start_blocking_portal() as portal:
            try:
                tools = portal.call(self._listed, within_s)
            except TimeoutError:
                raise ServerFailed(f"{self.name} did not answer within {within_s:g} s") from None
            # The client is foreign code.
            except Exception as error:
                raise self._failed(error) from error
        if not 0 < len(tools) <= MAX_TOOLS:
            raise ServerFailed(f"{self.name} has {len(tools)} tools; expected 1 to {MAX_TOOLS}")
        return [self._schema(tool) for tool in tools]

    async def _listed(self, within_s: float) -> list[mcp_types.Tool]:
        with anyio.fail_after(within_s):
            async with self._connected() as client:
                page = await client.list_tools()
                tools = page.tools
                while page.next_cursor and len(tools) <= MAX_TOOLS:
                    page = await client.list_tools(cursor=page.next_cursor)
                    tools += page.tools
                return tools

    def _schema(self, tool: mcp_types.Tool) -> dict[str, Any]:
        if not NAME.fullmatch(tool.name):
            raise ServerFailed(f"{self.name} has a tool named {tool.name!r:.200}; expected letters, digits and _ . / -")
        parameters = {"type": "object", "properties": {}, **tool.input_schema}
        function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
        return {"type": "function", "function": function}

    def open(self) -> None:
        """Connect for an episode.

        Raises:
            ServerFailed: the connection failed.
        """
        self._problem, self._watch = "", StreamGuard(self._fail)
        self._portal = self._stack.enter_context(start_blocking_portal())
        try:
            self._client = self._stack.enter_context(self._portal.wrap_async_context_manager(self._connected()))
        # The client is foreign code.
        except Exception as error:
            raise self._failed(error) from error

    def call(self, name: str, /, **arguments: Any) -> str | ToolResult:
        """Call a tool of the server and return the result as text, or as text with images.

        Raises:
            ToolError: the server replied that the call failed.
            ServerFailed: the server did not reply.
        """
        self._received = self._lines = self._watch.received = 0
        try:
            result = self._portal.call(partial(self._client.call_tool, name, arguments))
        except MCPError as error:
            if error.code == mcp_types.INVALID_PARAMS:
                raise ToolError(error.message) from None
            raise self._failed(error) from None
        # The client is foreign code, and may raise anything on a malformed result.
        except Exception as error:
            raise self._failed(error) from error
        text = said(result)
        if result.is_error:
            raise ToolError(text or f"{name} failed")
        images = [block for block in result.content if isinstance(block, mcp_types.ImageContent)]
        if not images:
            return text
        return ToolResult(said(result, images=True), [block.data for block in images], text)

    def close(self) -> None:
        """End the connection, and the server process of a command."""
        self._stack.close()

    def _failed(self, error: BaseException) -> ServerFailed:
        return ServerFailed(f"{self.name} {self._problem or f'failed with {cause(error)}'}")

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        async with Client(self._watched(), cache=None) as client:
            yield client

    @contextlib.asynccontextmanager
    async def _watched(self) -> AsyncIterator[Any]:
        async with self._process() if self._url is None else self._http(self._url) as (incoming, outgoing):
            yield ReadStream(incoming, self._watch), WriteStream(outgoing, self._watch)

    @contextlib.asynccontextmanager
    async def _http(self, url: str) -> AsyncIterator[Any]:
        # No compression: a bomb would be counted before it is unpacked.
        headers, hooks = {"Accept-Encoding": "identity"}, {"response": [self._bound]}
        async with (
            httpx2.AsyncClient(timeout=None, headers=headers, event_hooks=hooks) as client,
            streamable_http_client(url, http_client=client, max_sse_event_size=LIMIT) as streams,
        ):
            yield streams

    async def _bound(self, response: httpx2.Response) -> None:
        response.headers.pop("content-encoding", None)
        response.stream = _Bounded(self, response.stream)  # type: ignore[arg-type]

    def too_much(self) -> str:
        """Record that the server sent more than `LIMIT` bytes; returns the text of the problem."""
        self._fail(f"sent more than {LIMIT:,} bytes")
        return self._problem

    def _fail(self, problem: str) -> None:
        self._problem = self._problem or problem

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[Any]:
        """Start the server process of a command; yields the streams of its messages: (incoming, outgoing)."""
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                # A thread may be lost between fork and exec, but this one takes no locks.
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            self._problem = f"cannot be started ({error.strerror})"
            raise
        output, errors = await _reader(process.stdout, LIMIT), await _reader(process.stderr, LIMIT)
        stdin, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        arrived, incoming = anyio.create_memory_object_stream[Any](0)
        outgoing, leaving = anyio.create_memory_object_stream[Any](0)
        tail = bytearray()

        async def listen() -> None:
            while data := await errors.read(1 << 16):
                tail[:] = (tail + data)[-_MAX_LINE:]

        async def receive() -> None:
            async with arrived:
                await self._receive(output, arrived)
                if not self._problem:
                    self._problem = await _end(process, tail)

        async def send() -> None:
            async for message in leaving:
                stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")

        try:
            async with anyio.create_task_group() as tasks, arrived, incoming, outgoing, leaving:
                for task in (listen, receive, send):
                    tasks.start_soon(task)
                yield incoming, outgoing
                tasks.cancel_scope.cancel()
        finally:
            stdin.close()
            with anyio.CancelScope(shield=True):
                await _exited(process, END_S)
            # Not yet reaped, so that the number of the group is its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    async def _receive(self, output: asyncio.StreamReader, arrived: Any) -> None:
        """Forward the messages of the server to `arrived` until the server closes its output or sends too much."""
        while True:
            try:
                line = await output.readline()
            except ValueError:
                self.too_much()
                return
            self._received += len(line)
            self._lines += 1
            if self._received > LIMIT:
                self.too_much()
            elif self._lines > MAX_VALUES:
                self._fail(f"printed more than {MAX_VALUES:,} lines")
            if not line or self._problem:
                return
            try:
                message = SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False))
            except ValueError:
                if is_meant(line):
                    self._fail(f"sent a message that cannot be read: {line.decode(errors='replace').strip():.300}")
                    return
                continue
            try:
                await arrived.send(message)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return


class _Bounded(httpx2.AsyncByteStream):
    """The body of an HTTP response, limited to `LIMIT` bytes."""

    def __init__(self, server: Server, stream: httpx2.AsyncByteStream) -> None:
        self._server, self._stream = server, stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = LIMIT
        async for part in self._stream:
            left -= len(part)
            if left < 0:
                raise httpx2.StreamError(self._server.too_much())
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


def said(result: mcp_types.CallToolResult, images: bool = False) -> str:
    """Return the text of a tool's result; content that is not text becomes a note in brackets.

    With `images`, `<image>` stands for each image.
    """
    parts = []
    for block in result.content:
        inner = getattr(block, "resource", block)
        text = getattr(inner, "text", None)
        kind = getattr(inner, "mime_type", None) or block.type
        if images and isinstance(block, mcp_types.ImageContent):
            parts.append("<image>")
            continue
        parts.append(text if isinstance(text, str) else f"[{getattr(inner, 'uri', '') or kind}: no text]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _command(key: str, text: str) -> list[str]:
    try:
        name, *arguments = shlex.split(text)
    except ValueError:
        raise ValueError(
            f"{key} is mcp: {text}, which is no command and no URL; write mcp: PROGRAM ARGUMENTS"
        ) from None
    # A run may have an interpreter that no PATH leads to.
    found = shutil.which(sys.executable if name == "python" else name)
    if found is None:
        raise ValueError(f"{key} is mcp: {text}, but {name} is no program in PATH; name its file")
    return [found, *arguments]


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


async def _reader(pipe: Any, limit: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


async def _exited(process: subprocess.Popen[bytes], within_s: float) -> Any:
    """Wait for the end of a process, without reaping it. Returns how it ended, or None after `within_s` seconds."""
    with anyio.move_on_after(within_s):
        while True:
            found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                return found
            await anyio.sleep(0.01)
    return None


async def _end(process: subprocess.Popen[bytes], errors: bytearray) -> str:
    """Describe how a server process ended after it had closed its output; `errors` is the end of its standard error."""
    found = await _exited(process, END_S)
    last = errors.decode(errors="replace").strip().split("\n")[-1]
    words = f"; the last line on its standard error: {last}" if last else ""
    if found is None:
        return f"closed its output{words}"
    how = "exit code" if found.si_code == os.CLD_EXITED else "signal"
    return f"ended with {how} {found.si_status}{words}"
