"""Anthropic's Messages protocol: requests are converted to OpenAI's chat completions, completions back to messages.

Requests are converted by vLLM's own converter, so that vLLM's server and this endpoint read a request alike. The
converter is a part of that server; an engine imports it only if its clients speak this protocol.
"""

import json
from collections.abc import Iterator
from typing import Any

from aiohttp import web
from pydantic import ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

from pipeline.agent.endpoint.refused import RequestRefused
from pipeline.agent.inside.frames import MAX_MESSAGES
from pipeline.errors import short_reason

REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
"""Anthropic's `stop_reason` by OpenAI's `finish_reason`."""


def as_completion(asked: dict[str, Any], longest: int) -> dict[str, Any]:
    """Convert a request for a message into a request for a chat completion.

    Args:
        asked: the request.
        longest: maximum number of tokens of a turn. A larger `max_tokens`, a key that every request must have, is
            lowered to it.

    Raises:
        RequestRefused: the request is malformed, or has a key that is not supported.
    """
    try:
        count = len(asked["messages"])
        blocks = sum(len(one["content"]) for one in asked["messages"] if isinstance(one["content"], list))
    except (KeyError, TypeError):
        raise RequestRefused("messages must be a list of at least one {role, content}", "invalid_value") from None
    if count + blocks > MAX_MESSAGES:
        raise RequestRefused(f"messages have {count + blocks:,} parts; they may have {MAX_MESSAGES:,}", "invalid_value")
    try:
        request = AnthropicMessagesRequest.model_validate(asked)
        completion = AnthropicServingMessages.to_chat_completion_request(request)
        plain = completion.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RequestRefused(f"{place}: {first['msg']}", "invalid_value", param=place) from None
    # The converter is foreign code.
    except Exception as error:
        raise RequestRefused(f"the request cannot be read as a chat: {short_reason(error)}", "invalid_value") from error
    further = sorted(asked.keys() - AnthropicMessagesRequest.model_fields.keys())
    if further:
        raise RequestRefused(f"{further[0]!r:.40} is not supported; leave it out", "unsupported", param=further[0])
    plain.pop("max_completion_tokens", None)
    plain["max_tokens"] = min(plain["max_tokens"], longest)
    return plain


def message(completion: dict[str, Any]) -> dict[str, Any]:
    """Convert a chat completion into Anthropic's message."""
    [choice] = completion["choices"]
    said, usage = choice["message"], completion["usage"]
    content: list[dict[str, Any]] = []
    if said.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": said["reasoning_content"], "signature": completion["id"]})
    # Clients expect a block of text even if the turn is empty.
    if said["content"] or not said.get("tool_calls"):
        content.append({"type": "text", "text": said["content"] or ""})
    for call in said.get("tool_calls", ()):
        function = call["function"]
        made = {"name": function["name"], "input": json.loads(function["arguments"])}
        content.append({"type": "tool_use", "id": call["id"], **made})
    return {
        "id": completion["id"],
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": content,
        "stop_reason": REASONS[choice["finish_reason"]],
        "stop_sequence": None,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


def streamed(answer: dict[str, Any]) -> bytes:
    """Encode a message as a stream of server-sent events; each block of the message's content is one delta."""
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in _events(answer)).encode()


def _events(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "message_start", "message": answer | {"content": [], "stop_reason": None}}
    for index, block in enumerate(answer["content"]):
        kind = block["type"]
        if kind == "tool_use":
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
            begun = block | {"input": {}}
        elif kind == "thinking":
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
            begun = block | {"thinking": "", "signature": ""}
        else:
            deltas = [{"type": "text_delta", "text": block["text"]}]
            begun = block | {"text": ""}
        yield {"type": "content_block_start", "index": index, "content_block": begun}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": answer["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


def error(refused: RequestRefused) -> web.Response:
    """Make the HTTP response of a refusal in Anthropic's form."""
    body = {"type": "error", "error": {"type": "invalid_request_error", "message": str(refused)}}
    return web.json_response(body, status=refused.status, headers={"x-should-retry": "false"})
