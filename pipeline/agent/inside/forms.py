"""Conversion of messages between OpenAI's form, which clients and chat templates read, and the form of the column
`messages`.

This module needs Python 3.9 and nothing but the standard library; processes of episodes load it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.agent.inside.interface import Message

NEW_CONTEXT = "new_context"
"""Key, with the value true, that marks the first message of each further conversation in the column `messages`."""


def call_id(number: int) -> str:
    """Make the id of a call from its number in the turn: nine letters and digits, which Mistral's template demands."""
    return f"call{number:05}"


def tool_call(number: str, name: str, arguments: Any) -> dict[str, Any]:
    """Make a call in OpenAI's form.

    Args:
        number: id of the call.
        name: name of the tool.
        arguments: the arguments, as an object for most chat templates, as JSON text for clients and for some templates.
    """
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def as_recorded(message: Message) -> dict[str, Any]:
    """Convert a turn of the policy to the form of the column `messages`."""
    recorded: dict[str, Any] = {"role": "assistant", "content": message.text}
    if message.reasoning:
        recorded["reasoning"] = message.reasoning
    if message.calls:
        recorded["calls"] = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
    return recorded


def recorded(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages from OpenAI's form to the form of the column `messages`."""
    return [_recorded(message) for message in messages]


def _recorded(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return rest | {"calls": [call["function"] for call in message["tool_calls"]]}


def joined(conversations: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Join the conversations of an episode, each with at least one message, into one list for the column `messages`."""
    messages: list[dict[str, Any]] = []
    for number, conversation in enumerate(conversations):
        start = len(messages)
        # A message of the user's files that has the key already is not a border.
        messages += [_without_border(message) for message in conversation]
        if number:
            messages[start] = {**messages[start], NEW_CONTEXT: True}
    return messages


def _without_border(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != NEW_CONTEXT}


def split(messages: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split the column `messages` of a row into its conversations, at least one, and remove the marks of `joined`."""
    conversations: list[list[dict[str, Any]]] = [[]]
    for message in messages:
        if message.get(NEW_CONTEXT):
            conversations.append([])
        conversations[-1].append(_without_border(message))
    return conversations


def prompt_length(conversation: Sequence[dict[str, Any]], prompt: Sequence[dict[str, Any]]) -> int:
    """Return the number of messages at the start of a conversation that are the row's prompt: all of the prompt, or
    0."""
    return len(prompt) if list(conversation[: len(prompt)]) == recorded(prompt) else 0


def for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Convert a message of the column `messages` to the form that chat templates read."""
    shown = {name: value for name, value in message.items() if name not in ("calls", "reasoning")}
    if "reasoning" in message:
        shown["reasoning_content"] = message["reasoning"]
    if "calls" in message:
        shown["tool_calls"] = [tool_call(call_id(number), **call) for number, call in enumerate(message["calls"])]
    return shown
