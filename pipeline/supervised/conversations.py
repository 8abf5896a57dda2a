"""Cells of parquet files as the messages and tool schemas that chat templates take.

A struct in parquet has every field in every row, null where a row does not have it. Templates test whether a field is
there, so nulls are left out.
"""

import json
from typing import Any

import pyarrow as pa

Messages = list[dict[str, Any]]


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type can hold chat messages."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def checked_messages(value: Any, place: str) -> Messages:
    """A cell as messages without null fields; the arguments of tool calls are objects.

    Raises:
        ValueError: it holds none, one without role or content, or a tool call that cannot be read.
    """
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise ValueError(f"{place}: {str(value)[:200]} is not a list of messages {{role, content}}.")
    messages: Messages = without_nulls(value)
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{place}: message {number} has no role: {str(message)[:200]}.")
        calls = message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = _calls(calls, f"{place}: message {number}")
            message.setdefault("content", "")
        if "content" not in message:
            raise ValueError(f"{place}: message {number} has no content: {str(message)[:200]}.")
    return messages


def _calls(calls: Any, place: str) -> Messages:
    """Tool calls whose `arguments` are objects: templates write them as JSON."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{place} has tool_calls that are not a list of {{function}}: {str(calls)[:200]}.")
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{place} has a tool call without the name of a function: {str(call)[:200]}.")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _json(arguments, f"{place}, arguments of {function['name']}")
        if not isinstance(arguments, dict):
            raise ValueError(f"{place} has arguments of {function['name']} that are no object: {str(arguments)[:200]}.")
        function["arguments"] = arguments
    return calls


def checked_tools(value: Any, place: str) -> Messages | None:
    """A cell as tool schemas: a list of objects, or the same as JSON text; None where it is empty.

    Raises:
        ValueError: it is something else.
    """
    tools = _json(value, place) if isinstance(value, str) and value else value
    if isinstance(tools, list):
        tools = [_json(tool, place) if isinstance(tool, str) else without_nulls(tool) for tool in tools]
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{place}: {str(value)[:200]} is not a list of tool schemas.")
    return tools


def without_nulls(value: Any) -> Any:
    """`value` without the fields of its objects that are null, at any depth."""
    if isinstance(value, dict):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [without_nulls(entry) for entry in value]
    return value


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON ({error}): {text[:200]}") from error
