"""verl's MCP servers as entries of `agent.tools`.

A file of verl's tools names a JSON file with `mcpServers` (command, args and env, or url), which verl reads by FastMCP.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from jobs.verl.state import State

_KNOWN = ("command", "args", "env", "url", "transport", "type")
_SSE = re.compile(r"/sse(/|\?|&|$)")
_WRITE = "write each server into agent.tools as `mcp: COMMAND` or `mcp: URL`"


def tools_of(state: State, key: str, path: str) -> list[str]:
    """Return the entries of `agent.tools` for verl's file of tools: the file, or its MCP servers.

    Variables of servers are added to `agent.env_vars`.

    Args:
        state: the conversion.
        key: verl's key that names the file.
        path: the file; if it cannot be read here, it is returned, and the start of the run names the mistake.
    """
    try:
        entries = list(yaml.safe_load(Path(path).read_text(encoding="utf-8"))["tools"])
    except (OSError, TypeError, KeyError, ValueError, yaml.YAMLError):
        return [path]
    of_mcp = [entry for entry in entries if _is_mcp(entry)]
    if not of_mcp:
        return [path]
    if len(of_mcp) < len(entries):
        more = "put its other tools into a file without them, and that into agent.tools"
        state.leave(key, f"only the MCP servers of the file are converted; {more}", cannot=True)
    texts = [text for entry in of_mcp for text in _entry(state, key, entry)]
    if not texts and key not in state.reasons:
        state.leave(key, f"none of its MCP servers is converted; {_WRITE}", cannot=True)
    return texts


def _is_mcp(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    config = entry.get("config")
    return "mcp" in entry or (isinstance(config, dict) and config.get("type") == "mcp")


def _entry(state: State, key: str, entry: dict[str, Any]) -> list[str]:
    """Convert one entry of verl's file to the texts of its servers."""
    given = entry.get("mcp")
    settings = given if isinstance(given, dict) else {}
    file = settings.get("mcp_servers_config_path")
    try:
        servers = json.loads(Path(file).read_text(encoding="utf-8"))["mcpServers"].items()  # type: ignore[arg-type]
    except (OSError, TypeError, KeyError, ValueError, AttributeError):
        state.leave(key, f"mcp_servers_config_path={file} is no JSON file with mcpServers; {_WRITE}", cannot=True)
        return []
    texts = []
    for name, server in servers:
        try:
            text = _text(server)
            _variables(state, server.get("env") or {})
            texts.append(text)
        except ValueError as error:
            state.cannot.append(f"the MCP server {name!r} of {file} {error}")
    if selected := settings.get("tool_selected_list"):
        state.cannot.append(
            f"the model may call all tools of the MCP servers in {file}, in verl only {', '.join(map(str, selected))}; "
            "let the servers offer no others"
        )
    if not str(entry.get("class_name", "verl.tools.")).startswith("verl.tools."):
        state.cannot.append(f"{entry['class_name']} does not run: the model reads the text of an MCP tool's result")
    config = entry.get("config")
    if isinstance(config, dict) and (limit := config.get("rate_limit")):
        state.notes.append(f"calls of MCP tools have no rate limit, in verl rate_limit={limit} a second")
    if len(servers) > 1:
        state.notes.append("tools of MCP servers have their own names, in verl, with several servers, SERVER_TOOL")
    return texts


def _text(server: Any) -> str:
    """Return the entry of `agent.tools` for a server of the JSON file.

    Raises:
        ValueError: there is none; the message is a predicate.
    """
    if not isinstance(server, dict):
        raise ValueError(f"is not a mapping; {_WRITE}")
    if unknown := [name for name in server if name not in _KNOWN]:
        advice = {
            "auth_token": "give the command of a program that adds the token: mcp: COMMAND",
            "cwd": "write mcp: env --chdir=FOLDER COMMAND",
        }
        raise ValueError(f"has {', '.join(unknown)}, which is not converted; {advice.get(unknown[0], _WRITE)}")
    command, url = server.get("command"), server.get("url")
    if isinstance(url, str) and re.match(r"https?://", url):
        if "sse" in (server.get("transport"), server.get("type")) or _SSE.search(url):
            raise ValueError("speaks SSE, which is not supported; write mcp: URL with its address of streamable HTTP")
        return f"mcp: {url}"
    if isinstance(command, str) and isinstance(server.get("args", []), list):
        return f"mcp: {shlex.join([command, *map(str, server.get('args', []))])}"
    raise ValueError(f"has neither a command with a list of args nor an http(s) URL; {_WRITE}")


def _variables(state: State, env: Any) -> None:
    """Add the variables of a server to `agent.env_vars`.

    Raises:
        ValueError: they are not a mapping, or another server has other values; the message is a predicate.
    """
    if not isinstance(env, dict):
        raise ValueError("has an env that is no mapping; give agent.env_vars")
    given = {str(name): str(value) for name, value in env.items()}
    known = dict(state.get("agent.env_vars"))
    if other := [name for name in given if known.get(name, given[name]) != given[name]]:
        raise ValueError(
            f"has other values of {', '.join(other)} than another server; start it by mcp: env {other[0]}=VALUE COMMAND"
        )
    if given:
        state.set("agent.env_vars", known | given)
        state.notes.append(f"all environment processes have {', '.join(given)}, in verl only the MCP server")
