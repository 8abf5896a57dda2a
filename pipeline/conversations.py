"""Read conversations from rows, programs and generators, in the form that chat templates need.

1. The content of a message is text. Tool calls have OpenAI's form, with arguments as objects.
2. Templates test whether a field exists, so fields of messages and calls that are None are removed. Nulls inside of
   arguments and schemas are kept; nulls that Arrow adds were removed before (`cells.py`).
"""

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from pipeline.cells import from_json, is_list, is_text, may_be_object, parsed, plain

Messages = list[dict[str, Any]]
IMAGE = "<image>"
"""Text that stands for the next image of a prompt, in rows with images."""


def may_be_messages(kind: pa.DataType) -> bool:
    """Return True if cells of the type may hold a conversation."""
    if not is_list(kind):
        return is_text(kind) or isinstance(kind, pa.JsonType)
    message = kind.value_type
    if not isinstance(message, pa.StructType):
        return may_be_object(message) and not is_text(message)
    fields = {field.name: field.type for field in message}
    role, content = fields.get("role"), fields.get("content")
    if role is None or content is None or not (is_text(role) or isinstance(role, pa.JsonType)):
        return False
    return is_text(content) or isinstance(content, pa.JsonType) or is_list(content) or pa.types.is_null(content)


def read_messages(value: Any, place: str, images: bool = False) -> Messages:
    """Read messages from a cell of a row, or from a value that a program gives.

    Args:
        value: a list of messages, or its JSON.
        place: beginning of the error text.
        images: whether contents may have parts `{type: image}`, which become `IMAGE` in the text.

    Raises:
        ValueError: `value` is something else, or a message cannot be read.
    """
    found = plain(parsed(value, place))
    if not isinstance(found, list) or not found:
        raise ValueError(f"{place}: {found!r:.200} is not a list of messages {{role, content}}")
    return [_message(message, f"{place}: message {number}", images) for number, message in enumerate(found)]


def _message(value: Any, place: str, images: bool) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {value!r:.80} instead of {{role, content}}")
    message = {name: field for name, field in value.items() if field is not None}
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{place} has no role that is text: {message!r:.200}; write {{role, content}}")
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = read_calls(calls, place)
    if "content" not in message and not calls:
        raise ValueError(f"{place} has no content: {message!r:.200}")
    return message | {"content": read_content(message.get("content"), place, images)}


def read_content(content: Any, place: str, images: bool = False) -> str:
    """Return the content of a message as text. `content` may be text, None, or a list of text parts.

    With `images` it may have parts `{type: image}`, too, which become `IMAGE`. Raises ValueError for other contents;
    `place` begins the error text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    wanted = f"{place}: `content` must be a text, or parts {{type: text, text: ...}}"
    if not isinstance(content, list):
        raise ValueError(f"{wanted}, and is {content!r:.80}")
    if images:
        marks = [isinstance(part, dict) and part.get("type") == "image" for part in content]
        for part, mark in zip(content, marks, strict=True):
            if mark and (named := [name for name in part if name != "type" and part[name] is not None]):
                raise ValueError(
                    f"{place}: a part of type 'image' has {', '.join(named)}; images are read from the column of "
                    "images, so write {type: image} only"
                )
        content = [{"type": "text", "text": IMAGE} if mark else part for part, mark in zip(content, marks, strict=True)]
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f"of type {kind!r:.40}" if kind not in (None, "text") else f"{part!r:.80}"
            raise ValueError(f"{wanted}, and has a part {what}; only text can be read, so leave it out")
    return "".join(part["text"] for part in content)


def read_calls(calls: Any, place: str) -> Messages:
    """Return tool calls in OpenAI's form. Raises ValueError if one cannot be read; `place` begins the error text."""
    calls = parsed(calls, f"{place}, tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{place} has tool_calls that are not a list of {{function}}: {calls!r:.200}")
    return [_call(call, place) for call in calls]


def _call(value: dict[str, Any], place: str) -> dict[str, Any]:
    call = {name: field for name, field in value.items() if field is not None}
    function = call.pop("function", None)
    if function is None:
        # Some files have the function's fields in the call itself.
        function = {name: call.pop(name) for name in ("name", "arguments") if name in call}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{place} has a tool call without the name of a function: {value!r:.200}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise ValueError(f"{place}, arguments of {function['name']}: {error}; an object is needed") from error
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(
            f"{place} has arguments of {function['name']} that are not an object: {function['arguments']!r:.200}"
        )
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def begun_answer(messages: Messages) -> str | None:
    """Return the text of the last message if its role is `assistant` (the policy continues this text), else None."""
    last = messages[-1] if messages else {}
    return last["content"] if last.get("role") == "assistant" else None


def begun_text(cell: str | None) -> str:
    """Return the text of a last assistant message in a cell of the column `prompt` (JSON); "" without one."""
    return (begun_answer(json.loads(cell)) or "") if cell else ""


def answered(messages: Messages, answer: str) -> Messages:
    """Return the prompt with the response as its last message.

    If the prompt ends with an assistant message, `answer` begins with its text and replaces it.
    """
    before = messages if begun_answer(messages) is None else messages[:-1]
    return [*before, {"role": "assistant", "content": answer}]


def with_images(messages: Messages, count: int, place: str) -> Messages:
    """Return the messages of a prompt with images, with parts `{type: image}` in place of each `IMAGE`.

    Args:
        messages: the messages, as from `read_messages`.
        count: number of images of the prompt; without any, `IMAGE` is plain text.
        place: beginning of the error text.

    Raises:
        ValueError: `IMAGE` does not stand there `count` times, or stands in a message of the assistant.
    """
    if not count:
        return messages
    found = sum(message["content"].count(IMAGE) for message in messages)
    if found != count:
        raise ValueError(
            f"{place}: {IMAGE} stands {found} times in the prompt, which has {count} images; write one each"
        )
    if any(IMAGE in message["content"] for message in messages if message["role"] == "assistant"):
        raise ValueError(f"{place}: {IMAGE} stands in a message of the assistant; only other roles can show images")
    return [message | {"content": _parts(message["content"])} for message in messages]


def _parts(content: str) -> str | list[dict[str, str]]:
    first, *others = content.split(IMAGE)
    if not others:
        return content
    parts = [{"type": "text", "text": first}]
    for text in others:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part.get("text") != ""]


def rendered(messages: Messages, render: Callable[[Messages], str]) -> str:
    """Render a conversation with a chat template, with tool calls in the first form that the template writes.

    Most templates need arguments as objects, some as JSON text. Some write the calls of a message only if it has no
    content.

    Args:
        messages: the conversation, as from `read_messages`.
        render: function that renders messages with the template; raises ValueError if the template fails.

    Raises:
        ValueError: the template fails on all forms.
    """
    functions = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    if not functions:
        return render(messages)
    # A template that expects text may write an object as Python does.
    as_python = [str(function["arguments"]) for function in functions if _differs_in_python(function["arguments"])]
    texts: list[str] = []
    failed: ValueError | None = None
    for form in (messages, _with_texts(messages, ""), _with_texts(messages, None)):
        try:
            text = render(form)
        except ValueError as error:
            failed = failed or error
            continue
        named = all(function["name"] in text for function in functions)
        if named and not any(one in text for one in as_python) and _writes_calls(form, text, render):
            return text
        texts.append(text)
    if not texts:
        assert failed is not None
        raise failed
    return texts[0]


def _differs_in_python(arguments: dict[str, Any]) -> bool:
    return bool(arguments) and str(arguments) != json.dumps(arguments, ensure_ascii=False)


def _writes_calls(messages: Messages, text: str, render: Callable[[Messages], str]) -> bool:
    """Return True if the text would differ without the tool calls. (Their names may also occur elsewhere in it.)"""
    try:
        return text != render([{k: v for k, v in message.items() if k != "tool_calls"} for message in messages])
    except ValueError:
        return True


def _with_texts(messages: Messages, nothing: str | None) -> Messages:
    """Return the messages with arguments of tool calls as JSON text. In messages with calls, empty content becomes
    `nothing`."""
    return [
        {
            **message,
            "content": message["content"] or nothing,
            "tool_calls": [_with_text(c) for c in message["tool_calls"]],
        }
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def read_tools(value: Any, place: str) -> Messages | None:
    """Read a cell with tool schemas: a list of objects; the list and each object may be JSON text.

    Returns None if the cell is empty. `place` begins the error text.

    Raises:
        ValueError: the cell holds something else.
    """
    tools = plain(parsed(value, place))
    if not tools:
        return None
    schemas = [parsed(tool, place) for tool in tools] if isinstance(tools, list) else []
    if not schemas or not all(isinstance(tool, dict) for tool in schemas):
        raise ValueError(f"{place}: {value!r:.200} is not a list of tool schemas")
    return [_schema(tool, place) for tool in schemas]


def _schema(tool: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the schema with its parameters as an object. Files with different tools may have them as JSON text."""
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("parameters"), str):
        return tool
    read = {**function, "parameters": parsed(function["parameters"], f"{place}, parameters of a tool")}
    return {**tool, "function": read} if "function" in tool else read
