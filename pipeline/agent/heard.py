"""Messages of a conversation: their texts, and the forms in which they are compared."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pipeline.agent.tokens.context import Context


def characters(messages: list[dict[str, Any]]) -> int:
    """Count the characters of the texts of messages."""
    return sum(map(len, texts(messages)))


def texts(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the contents, names and calls of messages as texts, without the texts that the chat template adds."""
    for message in messages:
        yield message.get("content") or ""
        yield message.get("name") or ""
        for call in message.get("tool_calls") or ():
            yield json.dumps(call["function"], ensure_ascii=False)


def to_calls(context: Context, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each tool message after a context the id and name of the call that the message answers.

    The call is found by `tool_call_id` among the calls of the context's last turn.
    """
    named = []
    for message in messages:
        if message["role"] == "tool":
            message = dict(message)
            number = message.pop("tool_call_id", None)
            if number in context.call_ids:
                call = context.calls[context.call_ids.index(number)]
                message |= {"tool_call_id": call.id, "name": call.name}
        named.append(message)
    return named


def compared(message: dict[str, Any]) -> tuple[str, str, str]:
    """Return role, text and calls of a message in a form that is equal for equal messages, whatever their JSON
    layout."""
    calls = message.get("calls") or [call["function"] for call in message.get("tool_calls") or []]
    made = []
    for call in calls:
        arguments = call["arguments"]
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        made.append([call["name"], arguments])
    return message["role"], message.get("content") or "", json.dumps(made, sort_keys=True)
