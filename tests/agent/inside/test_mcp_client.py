"""MCP servers as toolsets: what they reply, and what is left when they fail."""

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.agent.errors import EpisodeFailed, PolicyMistake
from pipeline.agent.inside.load import load
from pipeline.agent.inside.mcp_client import LIMIT, Server
from pipeline.agent.inside.mcp_streams import is_meant
from pipeline.agent.inside.remote import ServerFailed
from pipeline.agent.processes import Processes
from pipeline.agent.tokens.pictures import decoded
from pipeline.config.agent import AgentConfig
from tests.agent.test_hostile import SECRET, marked, wait_until_gone
from tests.agent.test_processes import ROW, run

SERVER = str(Path(__file__).parents[1] / "mcp_tools.py")
COMMAND = f"mcp: python {SERVER} stdio"
NAME = rf"the MCP server 'python {SERVER} stdio'"


def config(mark: str, **settings: Any) -> AgentConfig:
    return AgentConfig(tools=[COMMAND], env_vars={SECRET: mark, "CURRENCY": "pence"}, **settings)


def test_the_tools_of_a_command(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")

    async def play(processes: Processes) -> None:
        loaded = await processes.start()
        assert loaded.forks and not loaded.environment
        price = next(tool["function"] for tool in loaded.tools if tool["function"]["name"] == "price")
        assert price["description"] == "What pieces of a fruit cost."
        assert price["parameters"]["properties"]["pieces"]["type"] == "integer"
        assert price["parameters"]["required"] == ["fruit"]
        first, second = await asyncio.gather(*(processes.open(ROW, 1, 30) for _ in range(2)))
        assert await first.call("price", {"fruit": "apple", "pieces": 2}, 30) == "6 in pence"
        with pytest.raises(PolicyMistake, match="^Error executing tool price: there is no plum$"):
            await first.call("price", {"fruit": "plum"}, 30)
        with pytest.raises(PolicyMistake, match="^the argument fruit of price: 5 is not of type 'string'$"):
            await first.call("price", {"fruit": 5}, 30)
        assert await first.call("add", {"fruits": ["fig"]}, 30) == "fig"
        assert await first.call("add", {"fruits": ["<é 😀>"]}, 30) == "fig\n<é 😀>"
        # Each episode has a server of its own.
        assert await second.call("add", {"fruits": []}, 30) == '{"result": []}'
        assert await second.call("picture", {}, 30) == "a pear\n[image/png: no text]"
        shown = await second.call("picture", {}, 30, True)
        assert shown.text == "a pear\n<image>"
        assert decoded(shown.images) == [b"png"]
        variables = await second.call("variables", {}, 30)
        assert SECRET in variables and "MLFLOW_TRACKING_TOKEN" not in variables
        os.kill(int(await second.call("process", {}, 30)), signal.SIGKILL)
        with pytest.raises(EpisodeFailed, match=rf"^ServerFailed: {NAME} ended with signal 9$"):
            await second.call("process", {}, 30)
        await first.close()
        await first.closing
        await asyncio.to_thread(wait_until_gone, str(tmp_path), 2)

    run(config(str(tmp_path)), play)
    wait_until_gone(str(tmp_path))


def test_a_used_process_has_a_server_for_each_episode(tmp_path: Path) -> None:
    async def play(processes: Processes) -> None:
        for fresh in (True, False):
            session = await processes.open(ROW, 1, 30)
            assert session.fresh is fresh
            assert await session.call("add", {"fruits": ["fig"]}, 30) == "fig"
            await session.close(True)
            await session.closing

    run(config(str(tmp_path), episodes_per_process=2), play)
    wait_until_gone(str(tmp_path))


FAILURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "ends": ("leave", {"code": 3}, f"{NAME} ended with exit code 3; the last line on its standard error: out of fruit"),
    "hangs": ("sleep", {}, "TimeoutError: no answer from tool sleep after 1 s"),
    "lines": ("shout", {"line": 1000}, f"{NAME} sent more than {LIMIT:,} bytes"),
    "one line": ("shout", {"line": -1}, f"{NAME} sent more than {LIMIT:,} bytes"),
    "result": ("shout", {"line": 0}, f"{NAME} sent more than {LIMIT:,} bytes"),
}


def test_a_server_that_fails_is_an_error_of_the_row_and_nothing_is_left(tmp_path: Path) -> None:
    async def outcome(processes: Processes, tool: str, arguments: dict[str, Any]) -> tuple[str, float]:
        session = await processes.open(ROW, 1, 30)
        began = time.monotonic()
        with pytest.raises(EpisodeFailed) as failed:
            await session.call(tool, arguments, 1 if tool == "sleep" else 20)
        with pytest.raises(EpisodeFailed):
            await session.call("price", {"fruit": "apple"}, 20)
        await session.close()
        return str(failed.value), time.monotonic() - began

    async def play(processes: Processes) -> list[tuple[str, float]]:
        await processes.start()
        outcomes = await asyncio.gather(*(outcome(processes, *call[:2]) for call in FAILURES.values()))
        await asyncio.to_thread(wait_until_gone, str(tmp_path), 2)
        return outcomes

    for (words, seconds), (_, _, expected) in zip(run(config(str(tmp_path)), play), FAILURES.values(), strict=True):
        assert expected in words
        assert seconds < 60


RUN = """
import asyncio, json, sys
from pipeline.agent.processes import Processes
from pipeline.config.agent import AgentConfig
async def main():
    processes = Processes(AgentConfig(**json.loads(sys.argv[1])))
    session = await processes.open(json.loads(sys.argv[2]), 1, 30)
    asyncio.create_task(session.call("sleep", {}, 100))
    print("ready", flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["run", "keeper", "zygote", "episode"])
def test_no_server_outlives_a_process_above_it(tmp_path: Path, victim: str) -> None:
    # A server that begins at once: what ends it is not its own.
    settings = {"tools": [f"mcp: {server([{**PLAIN, 'name': 'sleep'}])}"], "env_vars": {SECRET: str(tmp_path)}}
    words = [sys.executable, "-c", RUN, json.dumps(settings), json.dumps(ROW)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    # Keeper, zygote, episode, server, and what the server started.
    deadline = time.monotonic() + 20
    while len(below := sorted(marked(str(tmp_path)))) < 5:
        assert time.monotonic() < deadline, below
        time.sleep(0.02)
    os.kill({"run": process.pid, **dict(zip(("keeper", "zygote", "episode"), below, strict=False))}[victim], 9)
    # Without the keeper, what the server started in a session of its own is lost sight of.
    wait_until_gone(str(tmp_path), {"episode": 2, "keeper": 1}.get(victim, 0))
    for process_id in marked(str(tmp_path))[-1:] if victim == "keeper" else []:
        os.kill(process_id, 9)
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until_gone(str(tmp_path))


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.fixture
def url(port: int) -> Iterator[str]:
    """A server with an HTTP endpoint."""
    process = subprocess.Popen(
        [sys.executable, SERVER, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.05)
        yield f"http://user:word@127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def test_the_tools_of_a_url(url: str) -> None:
    name = f"the MCP server '{url.replace('user:word@', '')}'"

    async def play(processes: Processes) -> None:
        assert (await processes.start()).forks
        first, second, third, last = await asyncio.gather(*(processes.open(ROW, 1, 30) for _ in range(4)))
        assert await first.call("price", {"fruit": "apple", "pieces": 2}, 30) == "6 in nothing"
        with pytest.raises(PolicyMistake, match="there is no plum"):
            await first.call("price", {"fruit": "plum"}, 30)
        await first.close()
        await first.closing
        with pytest.raises(EpisodeFailed, match=f"{name} sent more than {LIMIT:,} bytes"):
            await second.call("shout", {"line": 0}, 30)
        with pytest.raises(EpisodeFailed, match=f"{name} failed with MCPError: Connection closed"):
            await third.call("leave", {"code": 0}, 30)
        with pytest.raises(EpisodeFailed, match=f"{name} failed with "):
            await last.call("price", {"fruit": "apple"}, 30)
        with pytest.raises(EpisodeFailed, match=f"ServerFailed: {name} failed with ConnectError"):
            await processes.open(ROW, 1, 30)

    run(AgentConfig(tools=[f"mcp: {url}"]), play)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("false", "agent.tools[0]: the MCP server 'false' ended with exit code 1"),
        ("sleep 1000", "agent.tools[0]: the MCP server 'sleep 1000' did not answer within 1 s"),
        ("sh -c 'echo no licence >&2; kill -9 $$'", "ended with signal 9; the last line on its standard error: no lic"),
        ("head -c 1000000000 /dev/zero", f"sent more than {LIMIT:,} bytes"),
        ("no-such-server x", "agent.tools[0] is mcp: no-such-server x, but no-such-server is no program in PATH"),
        ("/etc", "but /etc is no program in PATH; name its file"),
        ("'sh", "agent.tools[0] is mcp: 'sh, which is no command and no URL; write mcp: PROGRAM ARGUMENTS"),
        ("", "agent.tools[0] is mcp: , which is no command and no URL"),
        ("http://127.0.0.1:1/mcp", "the MCP server 'http://127.0.0.1:1/mcp' failed with ConnectError"),
    ],
)
def test_a_server_that_does_not_answer_is_refused(text: str, words: str) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError) as refused:
        load(None, {}, [f"mcp:{text}" if text else "mcp: "], within_s=1)
    assert words in str(refused.value)
    assert time.monotonic() - began < 60


LISTS = """
import json, subprocess, sys, time
tools = json.loads(sys.argv[1])
for line in sys.stdin:
    request = json.loads(line)
    method, answer = request["method"], {"jsonrpc": "2.0", "id": request.get("id")}
    print("a line of a log")
    if method == "initialize":
        info = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "x", "version": "1"}}
        print(json.dumps({**answer, "result": info}))
    elif method == "tools/list":
        page = int((request.get("params") or {}).get("cursor", 0))
        next = {"nextCursor": str(page + 1)} if page < int(sys.argv[2]) else {}
        listed = [{**tool, "name": tool["name"] + "_" * page} for tool in tools]
        print(json.dumps({**answer, "result": {"tools": listed, **next}}))
    elif method == "tools/call":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        time.sleep(1000)
    elif "id" in request:
        print(json.dumps({**answer, "error": {"code": -32601, "message": "no such method"}}))
    sys.stdout.flush()
"""
PLAIN = {"name": "look", "inputSchema": {"type": "object"}}


def server(tools: list[dict[str, Any]], pages: int = 0) -> str:
    """The command of a server of an older protocol, whose list of tools is that so many times more."""
    words = [sys.executable, "-S", "-c", LISTS, json.dumps(tools), str(pages)]
    return " ".join(f"'{word}'" for word in words)


def test_lists_come_in_pages_among_other_lines() -> None:
    found = Server("key", server([PLAIN], 2)).schemas(30)
    assert [tool["function"]["name"] for tool in found] == ["look", "look_", "look__"]
    assert found[0]["function"] == {
        "name": "look",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }


def test_a_server_that_hangs_as_an_episode_begins_is_named(tmp_path: Path) -> None:
    (tmp_path / "lists.py").write_text(LISTS)
    begin = f"test -e {tmp_path}/begun && exec sleep 1000; touch {tmp_path}/begun; exec {sys.executable} -S"
    command = f"mcp: sh -c \"{begin} {tmp_path}/lists.py '[{json.dumps(json.dumps(PLAIN))[1:-1]}]' 0\""

    async def play(processes: Processes) -> None:
        assert [tool["function"]["name"] for tool in (await processes.start()).tools] == ["look"]
        with pytest.raises(
            EpisodeFailed, match=r"^TimeoutError: no answer from reset after (1|0\.9\d?) s \(the MCP server 'sh -c"
        ):
            await processes.open(ROW, 1, 1)
        await asyncio.to_thread(wait_until_gone, str(tmp_path), 2)

    run(AgentConfig(tools=[command], env_vars={SECRET: str(tmp_path)}), play)
    wait_until_gone(str(tmp_path))


@pytest.mark.parametrize(
    ("tools", "pages", "words"),
    [
        ([], 0, "has 0 tools; expected 1 to 256"),
        ([PLAIN], 100000, "has 257 tools; expected 1 to 256"),
        ([{**PLAIN, "name": "<|im_start|>"}], 0, "has a tool named '<|im_start|>'; expected letters, digits"),
    ],
)
def test_a_list_that_cannot_be_shown_is_refused(tools: list[dict[str, Any]], pages: int, words: str) -> None:
    with pytest.raises(ServerFailed) as refused:
        Server("key", server(tools, pages)).schemas(30)
    assert words in str(refused.value)


DEEP: dict[str, Any] = {"type": "string"}
for _ in range(150):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "none"}, "^agent.tools: the tool look has no valid JSON schema: 'none' fits none of the forms"),
        (DEEP, "levels"),
    ],
)
def test_a_schema_that_is_none_is_refused(schema: Any, words: str) -> None:
    async def start(processes: Processes) -> None:
        with pytest.raises(ValueError, match=words):
            await processes.start()

    tools = [{**PLAIN, "inputSchema": {"type": "object", "properties": {"a": schema}}}]
    run(AgentConfig(tools=[f"mcp: {server(tools)}"]), start)


def test_two_servers_cannot_have_a_tool_of_the_same_name() -> None:
    with pytest.raises(ValueError, match=r"(?s)^agent.tools\[1\] is mcp:.*, but another tool is named look too"):
        load(None, {}, [f"mcp:{server([PLAIN])}", f"mcp: {server([PLAIN])}"], within_s=30)


REPLIES = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    method, answer = request["method"], {"jsonrpc": "2.0", "id": request.get("id")}
    if method == "initialize":
        info = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "x", "version": "1"}}
        print(json.dumps({**answer, "result": info}), flush=True)
    elif method == "tools/call":
        print("a line of a log", {"level": "info"}, flush=True)
        print(json.dumps({"level": "info", "id": 3}), {"level": "info"}, sep="\\n", flush=True)
        text = eval(sys.argv[1])
        sys.stdout.buffer.write(text if isinstance(text, bytes) else text.encode())
        sys.stdout.flush()
    elif method == "tools/list":
        print(json.dumps({**answer, "result": {"tools": []}}), flush=True)
    elif "id" in request:
        print(json.dumps({**answer, "error": {"code": -32601, "message": "no such method"}}), flush=True)
"""
SAID = '{"content": [{"type": "text", "text": "7"}]}'


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ('json.dumps(answer)[:-1] + "\\n"', "sent a message that cannot be read: {"),
        ('json.dumps({**answer, "result": 5}) + "\\n"', "sent a message that cannot be read: {"),
        ('json.dumps({"id": answer["id"], "result": {}}) + "\\n"', "sent a message that cannot be read: {"),
        ('json.dumps([answer]) + "\\n"', "sent a message that cannot be read: ["),
        ('b\'{"jsonrpc": "\\xff"}\\n\'', "sent a message that cannot be read: {"),
        ('json.dumps(answer)[:-1] + \', "result": \' + "[" * 100000 + "\\n"', "sent a message that cannot be read: {"),
        (f'json.dumps({{**answer, "id": 999, "result": {SAID}}}) + "\\n"', "of the id 999"),
        (f'json.dumps({{**answer, "id": 0, "result": {SAID}}}) + "\\n"', "answered a request that was not made"),
        ('json.dumps({"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "huh"}}) + "\\n"', ": huh"),
        ('json.dumps({**answer, "result": {"content": 5}}) + "\\n"', "failed with "),
        ('json.dumps({**answer, "result": {"content": [{"type": "odd"}]}}) + "\\n"', "failed with "),
        ('(json.dumps({"jsonrpc": "2.0", "method": "x"}) + "\\n") * 20000', "sent more than 4,096 messages"),
        ('"starts\\n" * 1_000_000', "printed more than 100,000 lines"),
        ('"x" * (17 << 20)', "sent more than 16,777,216 bytes"),
        (f'json.dumps({{**answer, "result": {SAID}}}) + "\\n"', ""),
    ],
)
def test_a_reply_that_cannot_be_read_fails_at_once(reply: str, words: str) -> None:
    made = Server("key", shlex.join([sys.executable, "-S", "-c", REPLIES, reply]))
    made.open()
    try:
        began = time.monotonic()
        if not words:
            assert made.call("look") == "7"
        else:
            with pytest.raises(ServerFailed) as failed:
                made.call("look")
            assert words in str(failed.value) and len(str(failed.value)) < 1500
            with pytest.raises(ServerFailed):
                made.call("look")
        # It is milliseconds, and some seconds where a flood comes to a busy machine.
        assert time.monotonic() - began < 60
    finally:
        made.close()


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        (b'{"jsonrpc": "2.0", ', True),
        (b' {"id": 1, "resu', True),
        (b'[{"jsonrpc": "2.0"}]', True),
        (b'{"id": 1, "error": 5}', True),
        (b'{"level": "info", "id": 3}', False),
        (b"{'level': 'info'}", False),
        (b"[INFO] starts", False),
        (b'DEBUG received {"jsonrpc": "2.0", "id": 3}', False),
        (b"\xff", False),
        (b"", False),
    ],
)
def test_lines_that_are_meant_as_messages(line: bytes, meant: bool) -> None:
    assert is_meant(line) is meant
