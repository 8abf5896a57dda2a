"""Schemas of tools: what the model reads about a function, and whether the arguments that it wrote fit.

Needs Python 3.9 and nothing but the standard library. `schema_of` follows `transformers.utils.get_json_schema`, whose
form chat templates expect.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_WORDS = {
    "string": "a text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
}
_NONE = type(None)
_UNIONS = (
    typing.Union,
    getattr(types, "UnionType", typing.Union),
)  # the second one is `int | str`, from Python 3.10 on
_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(\([^)]*\))?\s*:\s*(.*)$")
_MAX_DEPTH = 32
NAME = re.compile(r"[\w./-]{1,128}", re.ASCII)
"""What tools may be called."""


def schema_of(function: Callable) -> dict[str, Any]:
    """The OpenAI schema of a function, from its signature and its docstring in Google's style.

    Raises:
        ValueError: the function has no docstring, a parameter without a type hint, or one that JSON cannot give; the
            sentence names the parameter.
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
    """Name and `timeout_s` of a function that may be marked with `@tool`.

    Raises:
        ValueError: the mark has another one than a tool may have.
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
    """The part before the first section, and the descriptions in the section `Args`, each on one line."""
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
    """The schema of a type hint."""
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


def mistake(schema: dict[str, Any], arguments: dict[str, Any]) -> str | None:
    """What is wrong with the arguments of a call, in words for the model; None if they fit.

    An integer must be one that a float can hold, so that no tool fails because it computes with it.

    Args:
        schema: as from `schema_of`.
        arguments: by name.
    """
    function = schema["function"]
    parameters = function.get("parameters") or {}
    known = parameters.get("properties") or {}
    names = ", ".join(known) or "none"
    for name in arguments:
        if name not in known and not parameters.get("additionalProperties"):
            return f"{function['name']} has no argument {_shown(name)}; its arguments are: {names}"
    for name in parameters.get("required") or ():
        if name not in arguments:
            return f"the argument {name} of {function['name']} is missing"
    for name, value in arguments.items():
        if _is_large(value):
            problem: str | None = f"must have numbers of at most {sys.float_info.max_10_exp} digits"
        else:
            problem = _problem(known.get(name, parameters.get("additionalProperties")), value, _MAX_DEPTH)
        if problem:
            return f"the argument {name:.80} of {function['name']} {problem}"
    return None


def whole(schema: Any, value: Any) -> Any:
    """Arguments that fit a schema, with integers where it says so: a model may write 3.0, which is one in JSON."""
    if not isinstance(schema, dict):
        return value
    if isinstance(value, float) and schema.get("type") == "integer" and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [whole(schema.get("items"), item) for item in value]
    if isinstance(value, dict):
        known, others = schema.get("properties") or {}, schema.get("additionalProperties")
        return {name: whole(known.get(name, others), item) for name, item in value.items()}
    return value


def _is_large(value: Any) -> bool:
    """Whether there is an integer in a value that no float can hold."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, int) and abs(one) > sys.float_info.max:
            return True
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return False


def _problem(schema: Any, value: Any, depth: int) -> str | None:
    """What is wrong with a value, to stand behind its name."""
    if not isinstance(schema, dict):
        # True and False are schemas, too.
        return None
    if depth == 0:
        return "is nested too deeply"
    if value is None and schema.get("nullable"):
        return None
    if "enum" in schema and not any(value == one and _kind(value) is _kind(one) for one in schema["enum"]):
        return f"must be one of {', '.join(map(repr, schema['enum'])):.1000}, but is {_shown(value)}"
    kinds: Any = schema.get("type")
    if kinds is not None:
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not any(_is(kind, value) for kind in kinds):
            return f"must be {' or '.join(_WORDS.get(kind, kind) for kind in kinds)}, but is {_shown(value)}"
    choices = schema.get("anyOf")
    if choices and all(_problem(choice, value, depth - 1) for choice in choices):
        return f"is {_shown(value)}, which fits none of the forms in the schema"
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for index, item in enumerate(value):
            problem = _problem(schema["items"], item, depth - 1)
            if problem:
                return f"at index {index} {problem}"
    if isinstance(value, dict):
        return _member_problem(schema, value, depth)
    return None


def _member_problem(schema: dict[str, Any], value: dict[str, Any], depth: int) -> str | None:
    """What is wrong with the members of an object."""
    for name in schema.get("required") or ():
        if name not in value:
            return f"lacks the member {name}"
    others = schema.get("additionalProperties")
    known = schema.get("properties") or {}
    for name, item in value.items():
        inner = known.get(name, others if isinstance(others, dict) else {})
        problem = _problem(inner, item, depth - 1)
        if problem:
            return f"at {_shown(name)} {problem}"
    return None


def _kind(value: Any) -> type:
    """The type of a value in JSON, in which 1 and 1.0 are one number, and `true` is none."""
    return float if type(value) is int else type(value)


def _is(kind: str, value: Any) -> bool:
    """Whether a value of JSON is of a type of JSON schema."""
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, int):
        return kind in ("number", "integer")
    if isinstance(value, float):
        return math.isfinite(value) and (kind == "number" or (kind == "integer" and value.is_integer()))
    return kind == {str: "string", list: "array", dict: "object", _NONE: "null"}[type(value)]


def _shown(value: Any) -> str:
    """A value in a sentence for the model, cut."""
    try:
        text = f"the text {value[:80]!r}" if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):
        # Python writes no integers of thousands of digits.
        text = "too large to be shown"
    return text if len(text) <= 80 else text[:77] + "..."
