"""What becomes of the MCP servers in verl's tools."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.verl.state import State
from pipeline.agent.inside.mcp_client import Server
from tests.jobs.verl.test_convert import ROLLOUT, converted

KEY = f"{ROLLOUT}.multi_turn.tool_config_path"
SEARCH = {"class_name": "verl.tools.mcp_search_tool.MCPSearchTool", "config": {"type": "mcp"}}


def written(folder: Path, servers: Any, *others: dict[str, Any], **settings: Any) -> str:
    """Write verl's two files, and return the argument that names the first."""
    (folder / "servers.json").write_text(json.dumps(servers))
    mcp = {"mcp_servers_config_path": str(folder / "servers.json"), **settings}
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [SEARCH | {"mcp": mcp}, *others]}))
    return f"{KEY}={folder / 'tools.yaml'}"


def of(folder: Path, **servers: Any) -> State:
    return converted(written(folder, {"mcpServers": servers}))


def test_commands_and_urls(tmp_path: Path) -> None:
    variables = {"TAVILY_API_KEY": "x y", "TOP": 3}
    local = {"command": sys.executable, "args": ["a server.py", "--top", 3], "env": variables, "type": "stdio"}
    result = of(tmp_path, local=local, remote={"url": "http://localhost:8000/mcp", "transport": "http"})
    tools = result.values["agent.tools"]
    assert tools == [f"mcp: {sys.executable} 'a server.py' --top 3", "mcp: http://localhost:8000/mcp"]
    assert result.values["agent.env_vars"] == {"TAVILY_API_KEY": "x y", "TOP": "3"}
    assert not result.cannot and not result.left and KEY in result.converted
    notes = "\n".join(result.notes)
    assert "all environment processes have TAVILY_API_KEY, TOP" in notes and "several servers, SERVER_TOOL" in notes
    # A run reads them.
    servers = [Server("agent.tools", text.removeprefix("mcp:").strip()) for text in tools]
    assert servers[0]._command[1:] == ["a server.py", "--top", "3"] and servers[1]._url == "http://localhost:8000/mcp"


def test_variables_of_the_workers_stay(tmp_path: Path) -> None:
    argument = written(tmp_path, {"mcpServers": {"a": {"command": "a", "env": {"A": "1"}}}})
    result = converted(argument, "ray_kwargs.ray_init.runtime_env.env_vars.B=2")
    assert result.values["agent.env_vars"] == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({"url": "http://a/mcp", "auth_token": "t"}, "has auth_token, which is not converted; give the command of a"),
        ({"url": "http://a/mcp", "headers": {}}, "has headers, which is not converted; write each server into"),
        ({"command": "a", "cwd": "/b"}, "has cwd, which is not converted; write mcp: env --chdir=FOLDER COMMAND"),
        ({"url": "http://a/sse"}, "speaks SSE, which is not supported; write mcp: URL with its address of streamable"),
        ({"url": "http://a/mcp", "transport": "sse"}, "speaks SSE"),
        ({"url": "your_url"}, "has neither a command with a list of args nor an http(s) URL; write each server into"),
        ({"command": "a", "args": "b"}, "has neither a command with a list of args"),
        (
            {"command": "a", "env": {"A": "2"}},
            "has other values of A than another server; start it by mcp: env A=",
        ),
        ({"command": "a", "env": "A=2"}, "has an env that is no mapping; give agent.env_vars"),
        ("a", "is not a mapping; write each server into agent.tools as `mcp: COMMAND` or `mcp: URL`"),
    ],
)
def test_a_server_that_is_not_converted_is_named(tmp_path: Path, server: Any, words: str) -> None:
    result = of(tmp_path, good={"command": "good", "env": {"A": "1"}}, bad=server)
    (sentence,) = result.cannot
    assert sentence.startswith(f"the MCP server 'bad' of {tmp_path}/servers.json {words}")
    assert result.values["agent.tools"] == ["mcp: good"] and result.values["agent.env_vars"] == {"A": "1"}


def test_a_file_without_any_server_that_fits_is_named(tmp_path: Path) -> None:
    result = of(tmp_path, only={"url": "https://mcp.tavily.com/mcp", "auth_token": "t"})
    (left,) = result.left
    assert left.key == KEY and left.cannot and "none of its MCP servers is converted; write each" in left.reason
    assert "agent.tools" not in result.values and len(result.cannot) == 1


def test_the_rest_of_verls_settings_is_named(tmp_path: Path) -> None:
    servers = {"mcpServers": {"a": {"command": "a"}}}
    result = converted(written(tmp_path, servers, tool_selected_list=["search", "read"]))
    assert result.cannot == [
        f"the model may call all tools of the MCP servers in {tmp_path}/servers.json, in verl only search, read; let "
        "the servers offer no others"
    ]
    native = {"class_name": "my.Tool", "config": {"type": "native"}}
    result = converted(written(tmp_path, servers, native))
    ((left,), tools) = result.left, result.values["agent.tools"]
    assert tools == ["mcp: a"] and left.cannot and "put its other tools into a file without them" in left.reason
    file = {"mcp_servers_config_path": f"{tmp_path}/servers.json"}
    (tmp_path / "tools.yaml").write_text(
        yaml.safe_dump({"tools": [{"class_name": "my.Search", "config": {"rate_limit": 7}, "mcp": file}]})
    )
    result = converted(f"{KEY}={tmp_path}/tools.yaml")
    assert result.cannot == ["my.Search does not run: the model reads the text of an MCP tool's result"]
    assert "calls of MCP tools have no rate limit, in verl rate_limit=7 a second" in result.notes


@pytest.mark.parametrize("servers", [{}, [], {"mcpServers": []}, 3])
def test_a_file_of_servers_that_cannot_be_read_is_named(tmp_path: Path, servers: Any) -> None:
    ((left),) = converted(written(tmp_path, servers)).left
    assert left.key == KEY and left.cannot
    assert "servers.json is no JSON file with mcpServers; write each server into agent.tools" in left.reason


def test_other_files_of_tools_stay(tmp_path: Path) -> None:
    path = tmp_path / "tools.yaml"
    for text in ("tools: [{class_name: my.Tool, config: {type: native}}]", "tools: 3", "[", "x: &a [*a]"):
        path.write_text(text)
        assert converted(f"{KEY}={path}").values["agent.tools"] == [str(path)]
