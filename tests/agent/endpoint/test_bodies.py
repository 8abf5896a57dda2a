"""Bodies that clients may send: each is refused in words and soon, and the event loop goes on meanwhile."""

import asyncio
import contextlib
import gzip
import json
import time
import zlib
from typing import Any

import pytest

from pipeline.agent.conversation import Conversation
from pipeline.agent.endpoint.server import Route
from pipeline.agent.inside.frames import MAX_HEARD, MAX_MESSAGES, MAX_TOOLS, MAX_VALUES
from tests.agent.endpoint.test_server import talk
from tests.agent.test_episode import Policy, text
from tests.agent.test_program import user
from tests.bounds import bounded

GO = json.dumps({"messages": [user("go")], "max_tokens": 9}).encode()
GZIP, DEFLATE = {"Content-Encoding": "gzip"}, {"Content-Encoding": "deflate"}
BOMB = gzip.compress(gzip.compress(bytes(1 << 28)))


def asked(**more: Any) -> bytes:
    return json.dumps({"messages": [user("go")], "max_tokens": 9, **more}).encode()


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


HOSTILE: dict[str, tuple[bytes, dict[str, str], int, str]] = {
    "broken gzip": (b"\x1f\x8b\x08 nothing", GZIP, 400, "not packed as its header"),
    "no gzip": (GO, GZIP, 400, "not packed as its header"),
    "half a gzip": (gzip.compress(GO)[:-9], GZIP, 400, "breaks off before its end"),
    "broken deflate": (b"nothing", DEFLATE, 400, "not packed as its header"),
    "a bomb": (gzip.compress(bytes(1 << 28)), GZIP, 413, "longer than"),
    "a bomb in a bomb": (BOMB, {"Content-Encoding": "gzip, gzip"}, 400, "'gzip, gzip' is not read"),
    "unknown packing": (GO, {"Content-Encoding": "zstd"}, 400, "content-encoding 'zstd' is not read"),
    "no object": (b"[1]", {}, 400, "no JSON object"),
    "half JSON": (b'{"messages": ', {}, 400, "no JSON"),
    "nothing": (b"", {}, 400, "no JSON"),
    "no UTF-8": (b'{"messages": [{"role": "user", "content": "\xff"}]}', {}, 400, "utf-8"),
    "half a character": (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', {}, 400, "utf-8"),
    "NaN": (asked(temperature=float("nan")), {}, 400, "NaN is no JSON"),
    "an infinite number": (b'{"messages": [], "temperature": 1e999}', {}, 400, "1e999 is more than"),
    "a long integer": (b'{"max_tokens": ' + b"9" * 5000 + b"}", {}, 400, "no JSON"),
    "an integer that no float holds": (b'{"max_tokens": ' + b"9" * 400 + b"}", {}, 400, "max_tokens"),
    "deep brackets": (b"[" * 100_000, {}, 400, "no JSON"),
    "a deep value": (asked(odd=deep(900)), {}, 400, "levels"),
    "deep arguments": (asked(metadata=deep(150)), {}, 400, "levels"),
    "many values": (b'{"messages": [' + b"[]," * 300_000 + b"1]}", {}, 400, f"more than {MAX_VALUES:,} values"),
    "many messages": (asked(messages=[user("")] * 300_000), {}, 413, "longer than"),
    "some messages": (asked(messages=[user("")] * (MAX_MESSAGES + 1)), {}, 400, f"{MAX_MESSAGES + 1:,}"),
    "many tools": (asked(tools=[tool(f"t{i}") for i in range(MAX_TOOLS + 1)]), {}, 400, "tools"),
    "a long body": (b'{"a": "' + b"x" * MAX_HEARD + b'"}', {}, 413, "longer than"),
    "a long name of a key": (asked(**{"x" * 1_000_000: 1}), {}, 400, "not supported"),
    "a long role": (asked(messages=[{"role": "x" * 1_000_000, "content": ""}]), {}, 400, "role"),
    "a long name": (asked(messages=[{**user("x"), "name": "n" * 1_000_000}]), {}, 400, "characters"),
    "a long name of a tool": (asked(tools=[tool("t" * 1_000_000)]), {}, 400, "tools"),
    "true tokens": (asked(max_tokens=True), {}, 400, "max_tokens"),
    "an odd role": (asked(messages=[{"role": {"a": []}, "content": ""}]), {}, 400, "role"),
}


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/messages"])
def test_hostile_bodies(path: str) -> None:
    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        url = str(client.base_url).removesuffix("v1/") + path
        # The module of this protocol is imported at its first request.
        await client._client.post(url, content=b"{}")
        longest = 0.0

        async def watch() -> None:
            nonlocal longest
            while True:
                # The CPU time of the event loop's thread, which a busy machine does not change.
                before = time.thread_time()
                await asyncio.sleep(0.005)
                longest = max(longest, time.thread_time() - before)

        watching = asyncio.create_task(watch())
        for kind, (body, headers, status, words) in HOSTILE.items():
            with bounded():
                answer = await client._client.post(url, content=body, headers=headers)
            message = answer.json()["error"]["message"]
            assert len(message) < 2500, kind
            if path != "v1/messages" or answer.status_code == 413:
                assert (answer.status_code, words in message) == (status, True), (kind, answer.status_code, message)
            assert 400 <= answer.status_code < 500, (kind, answer.status_code, message)
        watching.cancel()
        # Without bounds it is many seconds.
        assert longest < 3, longest
        assert conversation.turns == 0 and not line.failed.done()

    talk(Policy(), use)


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_packed_bodies_are_read(pack: Any) -> None:
    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        headers = GZIP if pack is gzip.compress else DEFLATE
        answer = await client._client.post(f"{client.base_url}chat/completions", content=pack(GO), headers=headers)
        assert answer.json()["choices"][0]["message"]["content"] == "12"
        assert text(conversation.contexts[0].prompt_ids) == "go"

    talk(Policy("12"), use)


RAW: dict[str, bytes] = {
    "less than announced": b"Content-Length: 500\r\n\r\n" + GO,
    "more than announced": b"Content-Length: 5\r\n\r\n" + GO,
    "no number": b"Content-Length: x\r\n\r\n" + GO,
    "a negative number": b"Content-Length: -1\r\n\r\n" + GO,
    "broken chunks": b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + GO,
    "a long header": b"X: " + b"x" * 100_000 + b"\r\n\r\n",
    "many headers": b"".join(b"X%d: y\r\n" % i for i in range(50_000)) + b"\r\n",
}


@pytest.mark.parametrize("kind", RAW)
def test_requests_that_are_none(kind: str) -> None:
    """They are refused or dropped, and the next client is answered."""

    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        port, path = client.base_url.port, client.base_url.path
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST {path}chat/completions HTTP/1.1\r\nHost: x\r\n".encode() + RAW[kind])
        answer = b""
        # A server that refuses a request hangs up before it has all of it.
        with contextlib.suppress(ConnectionError):
            writer.write_eof()
            async with asyncio.timeout(2):
                answer = await reader.read()
        assert not answer or b" 400 " in answer.split(b"\r\n")[0], answer[:200]
        writer.close()
        said = await client.chat.completions.create(model="m", messages=[user("go")])
        assert said.choices[0].message.content == "12" and not line.failed.done()

    talk(Policy("12"), use)


def test_more_requests_than_may_be_open_wait() -> None:
    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        async def ask(number: int) -> str:
            url = f"{client.base_url}chat/completions"
            answer = await client._client.post(url, content=asked(seed=number), timeout=30)
            return answer.json()["choices"][0]["message"]["content"]

        assert await asyncio.gather(*(ask(number) for number in range(100))) == ["12"] * 100
        assert conversation.turns == 100

    talk(Policy(*["12"] * 100), use, max_turns=100, max_contexts=100)
