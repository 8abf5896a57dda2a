"""Imports the user's environment, tools and program, which the settings name.

This module needs Python 3.9 and nothing but the standard library; it runs in environment processes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from pipeline import imports
from pipeline.agent.inside import verl
from pipeline.agent.inside.frames import cut, text_of
from pipeline.agent.inside.interface import Environment
from pipeline.agent.inside.remote import MCP, OPENENV, ServerFailed
from pipeline.agent.inside.schema import mark_of, schema_of

if TYPE_CHECKING:
    from pipeline.agent.inside.mcp_client import Server

MAX_ERROR = 1000  # characters


@dataclass
class Tool:
    """A tool that the model may call."""

    schema: dict[str, Any]
    function: Callable[..., Any]
    timeout_s: float | None = None
    """Maximum seconds of one call; None takes `agent.step_timeout_s`."""
    episode: verl.VerlTool | None = None
    """A tool in verl's form, which is opened and closed with each episode; None for other tools."""
    method: bool = False
    """True if `function` is a method of the environment, so that it gets the environment as its first argument."""

    @property
    def name(self) -> str:
        """The name by which the model calls the tool."""
        return str(self.schema["function"]["name"])


@dataclass
class Code:
    """The loaded user code."""

    environment: Callable[[], Environment] | None = None
    """A function that makes the environment of an episode."""
    closes: bool = False
    """True if the environment, a tool or a server must be closed at the end of an episode."""
    tools: dict[str, Tool] = field(default_factory=dict)
    servers: list[Server] = field(default_factory=list)
    """MCP servers; each episode connects to them."""
    program: Callable[..., Any] | None = None
    """The program that drives an episode: `async def run(row, chat)`, or `def run(row)`."""
    note: str = ""
    """A notice for the author of the user's files if they use an outdated name; else ""."""
    client: bool = False
    """True if the program is `def run(row)`, with a client that reads OPENAI_BASE_URL or similar variables."""
    command: list[str] = field(default_factory=list)
    """The command that drives an episode: program and arguments."""
    folders: list[str] = field(default_factory=list)
    """Folders of the user's files; an error names the innermost line of code in them."""

    def words(self, error: BaseException) -> str:
        """Describe an exception with file and line in the user's code: `ValueError: boom (my_game.py, line 12)`."""
        return words(error, self.folders)

    def place(self, frame: FrameType | None) -> str:
        """Return the innermost line of the user's code in a stack, such as ` (my_game.py, line 12)`; "" if there is
        none."""
        while frame is not None:
            if _below(frame.f_code.co_filename, self.folders):
                return f" ({os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno})"
            frame = frame.f_back
        return ""


def words(error: BaseException, folders: list[str]) -> str:
    """Describe an exception as in `Code.words`; `folders` are the folders of the user's files."""
    name, text = type(error).__name__, text_of(error)
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and isinstance(error.msg, str):
        return cut(f"{name}: {error.msg} ({os.path.basename(error.filename)}, line {error.lineno})", MAX_ERROR)
    stack = traceback.extract_tb(error.__traceback__)
    deepest = next((frame for frame in reversed(stack) if _below(frame.filename, folders)), None)
    place = f" ({os.path.basename(deepest.filename):.200}, line {deepest.lineno})" if deepest is not None else ""
    return cut(f"{name}: {text}" if text else name, MAX_ERROR) + place


def _below(file: str, folders: list[str]) -> bool:
    return any(os.path.abspath(file).startswith(folder + os.sep) for folder in folders)


def load(
    environment: str | None,
    kwargs: dict[str, Any],
    tools: list[str],
    program: str | None = None,
    command: Sequence[str] = (),
    within_s: float = 60.0,
) -> Code:
    """Import the user's code, and check that the servers answer.

    Args:
        environment, kwargs, tools, program, command: the settings of these names in the section `agent`.
        within_s: seconds in which each server must answer.

    Raises:
        ValueError: something does not load, does not answer, or is not an environment, tool, program or command; the
            message names the key of the settings.
    """
    code = Code()
    if not command:
        # A command must find the modules of a fresh interpreter.
        verl.provide()
    if environment is not None and environment.startswith(OPENENV):
        _openenv(code, environment, kwargs, within_s)
    elif environment is not None:
        _environment(code, environment, kwargs)
    for index, spec in enumerate(tools):
        key = f"agent.tools[{index}]"
        for tool in _of_server(code, key, spec, within_s) if spec.startswith(MCP) else _tools(code, key, spec):
            if tool.name in code.tools:
                raise ValueError(f"{key} is {spec}, but another tool is named {tool.name} too; a name stands for one")
            code.tools[tool.name] = tool
            code.closes = code.closes or tool.episode is not None
    if program is not None:
        code.program = _program(code, program)
    if command:
        code.command = _command(command)
    return code


def _command(command: Sequence[str]) -> list[str]:
    # A run may have an interpreter that no PATH leads to.
    name = sys.executable if command[0] == "python" else command[0]
    found = shutil.which(name)
    if found is None:
        raise ValueError(f"agent.command begins with {command[0]}, which is no program in PATH; name its file")
    return [found, *command[1:]]


def _program(code: Code, spec: str) -> Callable[..., Any]:
    made = _named(code, "agent.program", spec)
    if not callable(made):
        raise ValueError(f"agent.program is {spec}, which is no function; write async def run(row, chat)")
    if not _takes(made, "row", "chat"):
        code.client = _takes(made, "row")
        if not code.client:
            raise ValueError(f"agent.program is {spec}, which can be called neither with (row, chat) nor with (row)")
    elif not inspect.iscoroutinefunction(made):
        raise ValueError(
            f"agent.program is {spec}, which is no coroutine function; write async def run(row, chat), or def run(row) "
            "with a client of its own"
        )
    return made


def _takes(function: Callable[..., Any], *arguments: str) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    # Some functions that are built in have no signature, which is a ValueError.
    except (TypeError, ValueError):
        return False
    return True


def _environment(code: Code, spec: str, kwargs: dict[str, Any]) -> None:
    made = _named(code, "agent.environment", spec)
    if verl.is_interaction(made):
        code.environment = lambda: verl.Interaction(made, kwargs)
        code.closes = True
        return
    if not (inspect.isclass(made) and issubclass(made, Environment)):
        raise ValueError(
            f"agent.environment is {spec}, which is no class that extends pipeline.agent.Environment, and no "
            "interaction of verl's (start_interaction, generate_response)"
        )
    try:
        inspect.signature(made).bind(**kwargs)
    except TypeError as error:
        raise ValueError(
            f"agent.kwargs do not fit {spec}: {error}; it takes {made.__name__}{inspect.signature(made)}"
        ) from None
    if made.reset is Environment.reset and hasattr(made, "open"):
        code.note = f"agent.environment is {spec}, whose method `open` is named `reset` now; rename it"
        made.reset = made.open  # type: ignore[method-assign]
    code.environment = lambda: made(**kwargs)
    code.closes = made.close is not Environment.close
    for name in dir(made):
        value = inspect.getattr_static(made, name)
        kinds = (staticmethod, classmethod)
        if isinstance(value, kinds) and (hasattr(value, "__tool__") or hasattr(value.__func__, "__tool__")):
            raise ValueError(
                f"agent.environment is {spec}, of which {name} is marked with @tool and is a {type(value).__name__}; "
                "make it a method, def NAME(self, ...)"
            )
    for _, method in inspect.getmembers(made, _is_marked):
        tool = _tool("agent.environment", method, True)
        if tool.name in code.tools:
            raise ValueError(
                f"agent.environment is {spec}, of which two methods are tools named {tool.name}; rename one"
            )
        code.tools[tool.name] = tool


def _openenv(code: Code, spec: str, kwargs: dict[str, Any], within_s: float) -> None:
    """Set the environment of an OpenEnv server in `code`, after a check that the server answers."""
    try:
        from pipeline.agent.inside.openenv import OpenEnv
    except ImportError as error:
        raise ValueError(_lacking("agent.environment", spec, "websockets", error)) from None
    try:
        inspect.signature(OpenEnv).bind("url", within_s, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"agent.kwargs do not fit {spec}: {error}; it takes observation_field, action_field and reset_kwargs"
        ) from None
    code.environment = lambda: OpenEnv(spec[len(OPENENV) :].strip(), within_s, **kwargs)
    code.closes = True
    try:
        code.environment().check()
    except (ServerFailed, ValueError) as error:
        raise ValueError(f"agent.environment: {error}") from None


def _of_server(code: Code, key: str, spec: str, within_s: float) -> list[Tool]:
    """Add an MCP server to `code`; returns the tools that it offers."""
    try:
        from pipeline.agent.inside.mcp_client import Server
    except ImportError as error:
        raise ValueError(_lacking(key, spec, "mcp, from version 2 on,", error)) from None
    server = Server(key, spec[len(MCP) :].strip())
    try:
        schemas = server.schemas(within_s)
    except ServerFailed as error:
        raise ValueError(f"{key}: {error}") from None
    code.servers.append(server)
    code.closes = True
    return [Tool(schema, partial(server.call, schema["function"]["name"])) for schema in schemas]


def _lacking(key: str, spec: str, package: str, error: ImportError) -> str:
    return (
        f"{key} is {spec}, which needs the package {package} in the interpreter of the episodes ({error}); "
        "the extra agents of slipstream-rl has it"
    )


def _tools(code: Code, key: str, spec: str) -> list[Tool]:
    """Load the tools that an entry of `agent.tools` names: one tool, or all marked functions in a file."""
    if spec.endswith((".yaml", ".yml")):
        return _tools_of_verl(code, key, spec)
    path, name = imports.split(spec)
    if name:
        named = _named(code, key, spec)
        return [_tool_of_verl(key, named, {}, None) if verl.is_tool(named) else _tool(key, named)]
    module = _module(code, key, path)
    marked = [value for value in vars(module).values() if _is_marked(value)]
    of_verl = [Tool(*entry) for entry in verl.function_tools(module.__name__)]
    if of_verl:
        return of_verl
    if not marked:
        raise ValueError(f"{key} is {spec}, in which no function is marked with @tool; mark it, or write {spec}:NAME")
    return [_tool(key, function) for function in marked]


def _tools_of_verl(code: Code, key: str, path: str) -> list[Tool]:
    """Load the tools that a YAML file in verl's form lists."""
    try:
        entries = verl.entries(path)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    tools = []
    for entry in entries:
        module, _, name = entry["class_name"].rpartition(".")
        made = _named(code, key, f"{module}:{name}")
        tools.append(_tool_of_verl(key, made, entry.get("config") or {}, entry.get("tool_schema")))
    return tools


def _tool_of_verl(key: str, made: Any, config: dict[str, Any], schema: dict[str, Any] | None) -> Tool:
    try:
        episode = verl.VerlTool(made, config, schema)
    except ValueError as error:
        raise ValueError(f"{key}: {made.__name__}: {error}") from None
    return Tool(episode.schema, episode.call, None, episode)


def _is_marked(value: Any) -> bool:
    return inspect.isfunction(value) and hasattr(value, "__tool__")


def _tool(key: str, function: Any, method: bool = False) -> Tool:
    if not inspect.isfunction(function):
        raise ValueError(f"{key}: {function!r} is no function")
    try:
        # A bound method has the parameters that the model gives.
        schema = schema_of(MethodType(function, key) if method else function)
        name, timeout_s = mark_of(function)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    schema["function"]["name"] = name
    return Tool(schema, function, timeout_s, method=method)


def _named(code: Code, key: str, spec: str) -> Any:
    """Import the object that `module:Name` or `/path/file.py:Name` names."""
    path, name = imports.split(spec)
    if not name:
        raise ValueError(f"{key} is {spec}, which names no class or function; write {spec}:NAME")
    module = _module(code, key, path)
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ValueError(f"{key} is {spec}, but {path} has no {name} (it has: {', '.join(sorted(own)) or 'nothing'})")
    return getattr(module, name)


def folders(environment: str | None, tools: list[str], program: str | None = None, **_: Any) -> list[str]:
    """List the folders of the files that these settings name, without importing the files."""
    specs = [imports.split(spec)[0] for spec in (environment, program) if spec is not None]
    for spec in tools:
        if spec.endswith((".yaml", ".yml")):
            specs.append(spec)
            # A mistake in the file becomes an error when it is loaded.
            with contextlib.suppress(ValueError):
                specs += [entry["class_name"] for entry in verl.entries(spec)]
        else:
            specs.append(imports.split(spec)[0])
    return [folder for path in specs for folder in _folders(path)]


def _folders(path: str) -> Sequence[str]:
    if path.endswith((".py", ".yaml", ".yml")):
        return [os.path.dirname(os.path.abspath(os.path.expanduser(path)))]
    try:
        spec = importlib.util.find_spec(path.split(".")[0])
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return list(spec.submodule_search_locations)
    return [os.path.dirname(str(spec.origin))] if spec.has_location else []


def _module(code: Code, key: str, path: str) -> ModuleType:
    """Import the module of a file or of a dotted name, and add its folder to `code.folders`."""
    file = os.path.abspath(os.path.expanduser(path))
    if imports.is_file(path):
        code.folders.append(os.path.dirname(file))
        # The file can import modules in its folder.
        if os.path.dirname(file) not in sys.path:
            sys.path.append(os.path.dirname(file))
    try:
        module = imports.load(path)
    except imports.NotCode as error:
        raise ValueError(f"{key} is {path}, which {error}") from error
    # A module may raise anything during its import.
    except BaseException as error:
        raise ValueError(f"{key}: importing {path} failed with {words(error, code.folders)}") from error
    code.folders.append(os.path.dirname(os.path.abspath(getattr(module, "__file__", None) or file)))
    return module
