"""Checks of a program's messages and tools, which may be anything; the checked ones have OpenAI's form."""

from typing import Any

from pipeline.agent.inside.forms import tool_call
from pipeline.agent.inside.frames import MAX_MESSAGES, MAX_TOOLS, depth
from pipeline.agent.inside.schema import NAME
from pipeline.agent.tokens.calls import MAX_DEPTH
from pipeline.conversations import read_calls, read_content

ROLES = ("system", "developer", "user", "assistant", "tool")
NOTES = ("reasoning", "reasoning_content", "refusal", "annotations", "audio", "function_call", "id")
"""Keys of assistant messages that clients send back. They are ignored: a context keeps the turn's own tokens."""
MAX_KEY = 256
"""Maximum length of a name or an id, in characters."""


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Check messages and convert them to the form of chat templates: contents are texts, arguments of calls are
    objects.

    Raises:
        ValueError: the messages are malformed. The message of the error addresses the author of the program.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message {role, content}")
    if len(messages) > MAX_MESSAGES:
        raise ValueError(f"messages are {len(messages):,}; a conversation may have {MAX_MESSAGES:,}")
    checked = [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]
    if checked[-1]["role"] == "assistant":
        raise ValueError("the last of the messages is the policy's own; end with one that it is to answer")
    return checked


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{place} is a {type(message).__name__}; expected {{role, content}}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{place} has the role {role!r:.40}; expected one of {', '.join(ROLES)}")
    known = {"role", "content", "name"}
    checked = {"role": role, "content": read_content(message.get("content"), place)}
    if role == "assistant":
        known |= {"tool_calls", *NOTES}
        if message.get("tool_calls"):
            checked["tool_calls"] = _calls(message["tool_calls"], place)
    if role == "tool":
        known.add("tool_call_id")
    for key in ("tool_call_id", "name"):
        value = message.get(key)
        if key in known and value is not None:
            if not isinstance(value, str):
                raise ValueError(f"{place}.{key} is no text")
            if len(value) > MAX_KEY:
                raise ValueError(f"{place}.{key} has {len(value):,} characters, more than {MAX_KEY}")
            checked[key] = value
    further = [key for key, value in message.items() if key not in known and value is not None]
    if further:
        names = ", ".join(f"{key!r:.80}" for key in further[:3])
        raise ValueError(f"{place} has {names}, which a message of {role} cannot have")
    return checked


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if depth(calls) > MAX_DEPTH:
        raise ValueError(f"{place}.tool_calls must be of few levels, at most {MAX_DEPTH}")
    checked = []
    for call in read_calls(calls, place):
        function = call["function"]
        if depth(function["arguments"]) > MAX_DEPTH:
            raise ValueError(f"{place}: the arguments of {function['name']} must be of few levels, at most {MAX_DEPTH}")
        checked.append(tool_call(str(call.get("id") or "")[:MAX_KEY], function["name"], function["arguments"]))
    return checked


def checked_tools(tools: Any) -> list[dict[str, Any]]:
    """Check schemas of tools and return them; None becomes an empty list.

    Raises:
        ValueError: the schemas are malformed, or two tools have the same name.
    """
    if tools is None:
        return []
    wanted = "must be {type: function, function: {name, description, parameters}}"
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS or depth(tools) > MAX_DEPTH:
        raise ValueError(f"tools must be a list of at most {MAX_TOOLS}; each {wanted}")
    names = set()
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if function is None or not isinstance(name, str) or not name:
            raise ValueError(f"tools[{number}] {wanted}")
        if not NAME.fullmatch(name):
            raise ValueError(f"tools[{number}] is named {name!r:.80}; write at most 128 letters, digits, _ . / -")
        parameters = function.get("parameters", {})
        if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
            raise ValueError(f"tools[{number}].function.parameters must be a JSON schema of an object")
        if name in names:
            raise ValueError(f"tools[{number}] is named {name}, and so is another; a name stands for one")
        names.add(name)
    return tools
