"""JSON schemas of tools, which the model reads, made from Python functions.

This module needs Python 3.9 and nothing but the standard library. `schema_of` follows
`transformers.utils.get_json_schema`, which makes the form that chat templates expect.
"""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Callable
from typing import Any

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_NONE = type(None)
_UNIONS = (
    typing.Union,
    getattr(types, "UnionType", typing.Union),
)  # the second one is `int | str`, from Python 3.10 on
_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(\([^)]*\))?\s*:\s*(.*)$")
NAME = re.compile(r"[\w./-]{1,128}", re.ASCII)
"""Pattern of allowed names of tools."""


def schema_of(function: Callable) -> dict[str, Any]:
    """Make the OpenAI schema of a function from its signature and its docstring in Google's style.

    Raises:
        ValueError: the function has no docstring, a parameter without a type hint, or a type that JSON cannot express;
            the message names the parameter.
    """
    name = function.__name__
    text, described = _docstring(inspect.getdoc(function) or "")
    if not text:
        raise ValueError(f"{name} has no docstring; its first words tell the model what the tool does")
    try:
        hints = typing.get_type_hints(function)
    # A type hint in quotes is code, which may raise anything.
    except Exception as error:
        raise ValueError(f"the type hints of {name} cannot be read: {type(error).__name__}: {error}") from error
    properties: dict[str, Any] = {}
    required: list[str] = []
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"{name} takes {parameter}, but a model gives arguments by the names in the schema")
        if key not in hints:
            raise ValueError(f"parameter {key} of {name} has no type hint, such as {key}: str")
        try:
            properties[key] = _type(hints[key])
        except ValueError as error:
            raise ValueError(f"parameter {key} of {name}: {error}") from None
        if key in described:
            properties[key]["description"] = described.pop(key)
        if parameter.default is parameter.empty:
            required.append(key)
    if described:
        raise ValueError(f"the docstring of {name} describes {', '.join(described)}, which {name} does not take")
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def mark_of(function: Callable) -> tuple[str, float | None]:
    """Return name and `timeout_s` of a function; they may be set by `@tool`.

    Raises:
        ValueError: `@tool` set a name or a timeout that is not allowed.
    """
    marks = getattr(function, "__tool__", {})
    name, timeout_s = marks.get("name", function.__name__), marks.get("timeout_s")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"@tool(name={name!r:.200}) of {function.__name__}: write letters, digits, _ . / -")
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (number and 0 < timeout_s < math.inf):
        raise ValueError(f"@tool(timeout_s={timeout_s!r:.200}) of {function.__name__}: expected seconds above 0")
    return name, timeout_s


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first section, and the descriptions in the section `Args` by name, each as one
    line."""
    head: list[str] = []
    described: dict[str, list[str]] = {}
    section, indent, current = "", 0, head
    for line in text.splitlines():
        if _SECTION.match(line):
            section = line.split(":")[0]
            indent = 0
        elif not section:
            head.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            found = _ARGUMENT.match(line.strip()) if depth == indent else None
            if found:
                current = described[found.group(1)] = [found.group(3)]
            else:
                current.append(line)
    joined = {name: " ".join(line.strip() for line in lines).strip() for name, lines in described.items()}
    return "\n".join(head).strip(), joined


def _type(hint: Any) -> dict[str, Any]:
    """Make the JSON schema of a type hint. Raises ValueError if a model cannot write values of the type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if isinstance(hint, type) and hint in _NAMES:
        return {"type": _NAMES[hint]}
    if origin in (list, dict) and not arguments:
        # `typing.List`, which Python's own `list` is not equal to.
        return {"type": _NAMES[origin]}
    if origin is typing.Literal:
        kinds = {_NAMES.get(type(value)) for value in arguments}
        if len(kinds) != 1 or kinds == {None}:
            raise ValueError(f"the values of {hint} must be of one type: text, numbers, or true and false")
        return {"type": kinds.pop(), "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _type(arguments[0])}
    if origin is dict:
        if arguments[0] is not str:
            raise ValueError(f"{hint} has keys that are no text")
        return {"type": "object", "additionalProperties": _type(arguments[1])}
    if origin in _UNIONS:
        made = [_type(argument) for argument in arguments if argument is not _NONE]
        plain = all(set(one) == {"type"} for one in made)
        union = made[0] if len(made) == 1 else {"anyOf": made}
        if plain and len(made) > 1:
            union = {"type": sorted(one["type"] for one in made)}
        return {**union, "nullable": True} if _NONE in arguments else union
    raise ValueError(f"{hint!r} is no type that a model can write; use str, int, float, bool, list, dict or Literal")
