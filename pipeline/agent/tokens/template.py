"""Rendering of a chat template, and the part of the rendered text after a turn.

That part is found by rendering `[user, assistant(SENTINEL), *messages]` and keeping the text after the sentinel.
"""

import json
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.agent.inside.forms import call_id, tool_call
from pipeline.agent.inside.interface import Call
from pipeline.agent.tokens.control import tokens_of
from pipeline.errors import short_reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION = {"role": "user", "content": "Hello."}

FORMS = ("objects", "texts", "alone")
"""Forms of calls that templates read: arguments as objects (`objects`), as JSON texts (`texts`), or as JSON texts in a
message without content (`alone`)."""


class Rendering(NamedTuple):
    """How the turn before the new messages is rendered, to find the text after it."""

    calls: str
    """`none`, or an entry of `FORMS` (`objects`, `texts`) to render a tool call in the turn: some templates write a
    tool's result only after its call."""
    tools: bool
    """True to render the schemas of the tools, too."""


class Template:
    """The chat template of a model, with fixed arguments and tools.

    Args:
        tokenizer: tokenizer of the model.
        kwargs: further arguments of the template.
        tools: schemas of the tools.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", kwargs: dict[str, Any], tools: list[dict]) -> None:
        self.tokenizer, self.kwargs, self.tools = tokenizer, kwargs, tools
        self.tokens = tokens_of(tokenizer)
        self._sentinel = f"S{secrets.token_hex(8)}S"

    def render(self, messages: list[dict], tools: list[dict] | None, generate: bool = True) -> str:
        """Render the text of a conversation.

        Args:
            messages: messages in OpenAI's form.
            tools: schemas of the tools.
            generate: true to append the generation prompt.

        Raises:
            ValueError: the template fails.
        """
        try:
            text: Any = self.tokenizer.apply_chat_template(
                messages,
                tools=[*tools] if tools else None,
                tokenize=False,
                add_generation_prompt=generate,
                **self.kwargs,
            )
        # A template is foreign code and may raise anything.
        except Exception as error:
            roles = ", ".join(str(message.get("role"))[:40] for message in messages)
            raise ValueError(
                f"the model's chat template fails on messages of the roles {roles}: {short_reason(error)}"
            ) from error
        return text

    def behind(self, way: Rendering, messages: list[dict], calls: Sequence[Call], generate: bool = True) -> str:
        """Return the rendered text after a turn; if the turn has calls, after the argument of the last call.

        Args:
            way: how the turn is rendered.
            messages: messages after the turn.
            calls: calls of the turn; if empty, one placeholder for each tool result in `messages`, at least one.
            generate: true to append the generation prompt.

        Raises:
            ValueError: the template fails, or does not write the turn exactly once.
        """
        if way.calls != "none" and not calls:
            results = [message for message in messages if message["role"] == "tool"]
            calls = [Call(call_id(number), "tool", {}) for number in range(len(results) or 1)]
        answer = said(self._sentinel, calls, way.calls, in_call=True)
        text = self.render([QUESTION, answer, *answering(messages, calls)], self.tools if way.tools else None, generate)
        count = text.count(self._sentinel)
        if count != 1:
            raise ValueError(f"the chat template writes an assistant's text {count} times, not once")
        return text[text.index(self._sentinel) + len(self._sentinel) :]

    def tail(self, way: Rendering, closing: str, messages: list[dict], calls: Sequence[Call]) -> str:
        """Return the text after a turn, with the generation prompt; after calls, it begins at the control token
        `closing`."""
        text = self.behind(way, messages, calls)
        return text if way.calls == "none" else text[text.index(closing) :]


def said(text: str, calls: Sequence[Call], form: str, in_call: bool = False) -> dict[str, Any]:
    """Make an assistant's message.

    Args:
        text: content of the message; with `in_call` and if there are calls, the argument of the last one.
        calls: calls of the message.
        form: one of `FORMS`, or `none` to leave the calls out.
        in_call: true to replace the arguments of the calls by one each: "x", and `text` in the last call.
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if form == "none" or not calls:
        return message
    if in_call:
        message["content"] = ""
        calls = [Call(call.id, call.name, {"value": "x"}) for call in calls]
        calls[-1].arguments = {"value": text}
    if form == "alone":
        message["content"] = None
    message["tool_calls"] = [tool_call(call.id, call.name, arguments(call, form)) for call in calls]
    return message


def arguments(call: Call, form: str) -> Any:
    """Convert the arguments of a call for `form`, an entry of `FORMS`: to an object or to JSON text."""
    return call.arguments if form == "objects" else json.dumps(call.arguments, ensure_ascii=False)


def answering(messages: list[dict], calls: Sequence[Call]) -> list[dict]:
    """Give each message of role `tool` the id and name of the call that it answers, in order."""
    waiting = iter(calls)
    named = []
    for message in messages:
        call = next(waiting, None) if message["role"] == "tool" else None
        named.append(message if call is None else {"tool_call_id": call.id, "name": call.name, **message})
    return named


def common_prefix(one: str, other: str) -> str:
    """Return the longest common prefix of two texts."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]
