"""Adapters for verl's environments and tools: interactions, tools (`BaseTool` and its YAML file) and function tools.

This module needs Python 3.9 and nothing but the standard library (and PyYAML for a YAML file); it runs in environment
processes. If verl is not installed, `provide` replaces the few of its modules that such files import.

As in verl, rewards that tools return do not count: the reward of `execute` is dropped, and `calc_reward` is not called.
Unlike in verl, a tool is created once for an episode, at its first call, and released at the end. An exception of a
tool fails the row, while verl shows it to the model.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import io
import json
import os
import sys
import types
import uuid
from collections.abc import Callable
from typing import Any

from pipeline.agent.inside.interface import Environment, Message, Observation, ToolResult
from pipeline.agent.inside.schema import schema_of

FUNCTION_TOOLS = "verl.tools.function_tool"


def is_interaction(made: Any) -> bool:
    """Return whether a class is one of verl's interactions."""
    return inspect.isclass(made) and hasattr(made, "start_interaction") and hasattr(made, "generate_response")


def is_tool(made: Any) -> bool:
    """Return whether a class is one of verl's tools."""
    return inspect.isclass(made) and hasattr(made, "create") and hasattr(made, "execute")


class Interaction(Environment):
    """An interaction of verl as an environment.

    `agent.kwargs` are the interaction's `config`, and a row's `extra_info.interaction_kwargs` its keyword arguments.
    """

    def __init__(self, made: Any, config: dict[str, Any]) -> None:
        self._interaction = made(config)
        self._id = uuid.uuid4().hex

    async def reset(self, row: dict[str, Any], seed: int) -> None:  # type: ignore[override]
        self._messages = [dict(message) for message in row["prompt"]]
        self._kwargs = dict((row["extra_info"] or {}).get("interaction_kwargs") or {})
        await self._interaction.start_interaction(self._id, **self._kwargs)

    async def step(self, message: Message) -> Observation:  # type: ignore[override]
        self._messages.append({"role": "assistant", "content": message.text})
        messages = [dict(one) for one in self._messages]
        answer = await self._interaction.generate_response(self._id, messages, **self._kwargs)
        if not isinstance(answer, tuple) or len(answer) != 4:
            raise ValueError(f"generate_response returned {answer!r}; expected (should_terminate, text, score, extra)")
        done, text, score, parts = answer
        self._messages.append({"role": "user", "content": text})
        return Observation(None if done else text, bool(done), score, parts or {})

    async def close(self) -> None:  # type: ignore[override]
        await _fitting(self._interaction.finalize_interaction, instance_id=self._id, **self._kwargs)


class VerlTool:
    """A tool of verl, for one episode after the other.

    Args:
        made: class of the tool.
        config: configuration of the tool.
        schema: schema of the tool from verl's YAML file; None if the class has its own.

    Raises:
        ValueError: (when made) the tool cannot be made, or has no schema.
    """

    def __init__(self, made: Any, config: dict[str, Any], schema: dict[str, Any] | None) -> None:
        provide()
        form = importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema
        try:
            self._tool = made(config, form.model_validate(schema) if schema is not None else None)
        # The user's code may raise anything.
        except Exception as error:
            raise ValueError(f"making it failed with {type(error).__name__}: {error}") from error
        self.schema = _dumped(self._tool.tool_schema)
        self._id: str | None = None
        self._kwargs: dict[str, Any] = {}

    def open(self, row: dict[str, Any]) -> None:
        """Begin an episode: take the tool's keyword arguments from the row."""
        name = self.schema["function"]["name"]
        self._kwargs = ((row["extra_info"] or {}).get("tools_kwargs") or {}).get(name) or {}

    async def call(self, /, **arguments: Any) -> str | ToolResult:
        """Call the tool and return the text of its result. The first call in an episode creates the tool."""
        if self._id is None:
            given = self._kwargs.get("create_kwargs") or {}
            # verl's versions pass them to `create` in different ways.
            created = await _fitting(self._tool.create, create_kwargs=given, **given)
            self._id = str(created[0] if isinstance(created, tuple) else created)
        result = await self._tool.execute(self._id, arguments, **(self._kwargs.get("execute_kwargs") or {}))
        return said(result)

    async def close(self) -> None:
        """End the episode: release the tool if it was created."""
        number, self._id = self._id, None
        if number is not None:
            await self._tool.release(number, **(self._kwargs.get("release_kwargs") or {}))


def said(result: Any) -> str | ToolResult:
    """Return the text, or text and images, in the result of a verl tool: text, `ToolResponse`, or a tuple that begins
    with one of them. As in verl, the model sees the images before the text.

    Raises:
        ValueError: the result holds videos, or an image that is neither bytes nor one of the package `pillow`.
    """
    if isinstance(result, tuple) and 1 <= len(result) <= 3:
        result = result[0]
    if isinstance(result, str):
        return result
    if getattr(result, "video", None):
        raise ValueError("the tool returned a video; only text and images can be read here")
    if images := getattr(result, "image", None):
        encoded = [_encoded(image) for image in (images if isinstance(images, (list, tuple)) else [images])]
        return ToolResult("<image>" * len(encoded) + (getattr(result, "text", None) or ""), encoded)
    if hasattr(result, "text"):
        return result.text or ""
    return json.dumps(result, ensure_ascii=False) if isinstance(result, dict) else str(result)


def _encoded(image: Any) -> bytes:
    if isinstance(image, bytes):
        return image
    if not hasattr(image, "save"):
        raise ValueError(f"the tool returned a {type(image).__name__} as an image; return an image of pillow, or bytes")
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


async def _fitting(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a coroutine function with the arguments that it takes."""
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    return await function(**arguments)


def _dumped(schema: Any) -> dict[str, Any]:
    """Convert a schema of verl to OpenAI's form.

    Raises:
        ValueError: the schema is None.
    """
    if schema is None:
        raise ValueError("it has no schema; give `tool_schema` in verl's YAML file")
    return json.loads(json.dumps(schema.model_dump(exclude_unset=True, exclude_none=True)))


def function_tools(module: str) -> list[tuple[dict[str, Any], Callable[..., Any]]]:
    """Return (schema, function) of each function in a module that is marked with verl's `@function_tool`."""
    registry = getattr(sys.modules.get(FUNCTION_TOOLS), "FUNCTION_TOOL_REGISTRY", {})
    found = [entry for entry in registry.values() if entry.fn.__module__ == module]
    return [(_dumped(entry.tool_schema), _said_by(entry.fn)) for entry in found]


def _said_by(function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(**arguments: Any) -> str | ToolResult:
        result = function(**arguments)
        return said(await result if inspect.isawaitable(result) else result)

    return call


def entries(path: str) -> list[dict[str, Any]]:
    """Read the tools in verl's YAML file, each with `class_name`, `config` and `tool_schema`.

    Raises:
        ValueError: the file does not exist, is malformed, or holds a tool that cannot be used; or PyYAML is missing.
    """
    try:
        import yaml
    except ImportError:
        raise ValueError(f"{path} is YAML, but {sys.executable} has no PyYAML; install it there") from None
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            found = yaml.safe_load(file)["tools"]
        for entry in found:
            kind = "mcp" if "mcp" in entry else (entry.get("config") or {}).get("type", "native")
            if kind != "native":
                advice = "; write its servers into agent.tools as mcp: COMMAND or mcp: URL" if kind == "mcp" else ""
                raise ValueError(f"{path}: a tool of the type {kind} cannot be used, only native ones{advice}")
            if "." not in entry["class_name"]:
                raise ValueError(f"{path}: class_name is {entry['class_name']}; expected module.Class")
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; name a YAML file of tools that exists") from None
    except (OSError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is no file of tools as verl's (tools: - class_name: ...): {error!r}") from None
    return list(found)


class _Model:
    """A replacement for verl's pydantic models of schemas."""

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if name == "properties":
                value = {key: one if isinstance(one, _Model) else _Model(**one) for key, one in value.items()}
            elif isinstance(value, dict):
                value = _Model(**value)
            setattr(self, name, value)

    @classmethod
    def model_validate(cls, value: dict[str, Any]) -> _Model:
        return cls(**value)

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return {name: _plain(value) for name, value in vars(self).items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value.model_dump() if isinstance(value, _Model) else value


class _Response:
    """A replacement for verl's `ToolResponse`."""

    def __init__(self, text: str | None = None, image: Any = None, video: Any = None) -> None:
        self.text = text
        self.image = image
        self.video = video


class _Tool:
    """A replacement for verl's `BaseTool`."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name if self.tool_schema is not None else None

    def get_openai_tool_schema(self) -> Any:
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **_: Any) -> tuple[str, _Response]:
        return instance_id or uuid.uuid4().hex, _Response()

    async def calc_reward(self, instance_id: str, **_: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **_: Any) -> None:
        return


class _Interaction:
    """A replacement for verl's `BaseInteraction`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **_: Any) -> str:
        return instance_id or uuid.uuid4().hex

    async def finalize_interaction(self, instance_id: str | None = None, **_: Any) -> None:
        return


_REGISTRY: dict[str, Any] = {}


def _function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """Register a function as a tool, like verl's `function_tool`."""

    def mark(function: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
        made = schema if schema is not None else schema_of(function)
        model = made if isinstance(made, _Model) else _Model(**made)
        model.function.name = name or function.__name__  # type: ignore[attr-defined]
        _REGISTRY[model.function.name] = types.SimpleNamespace(fn=function, tool_schema=model)  # type: ignore[attr-defined]
        return function

    return mark(name) if callable(name) else lambda function: mark(function, name)


_SCHEMAS = ("Tool", "", "Parameters", "Property")
_MODULES: dict[str, dict[str, Any]] = {
    "verl": {},
    "verl.interactions": {},
    "verl.interactions.base": {"BaseInteraction": _Interaction},
    "verl.tools": {},
    "verl.tools.base_tool": {"BaseTool": _Tool},
    "verl.tools.schemas": {"ToolResponse": _Response, **{f"OpenAIFunction{kind}Schema": _Model for kind in _SCHEMAS}},
    FUNCTION_TOOLS: {"function_tool": _function_tool, "FUNCTION_TOOL_REGISTRY": _REGISTRY},
    "verl.utils": {},
    "verl.utils.rollout_trace": {"rollout_trace_op": lambda function: function},
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder that imports the replacements of verl's modules if no other finder finds the modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _MODULES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=not _MODULES[name])

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(_MODULES[module.__name__])


def provide() -> None:
    """Make the base classes of verl's tools and interactions importable even if verl is not installed."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
