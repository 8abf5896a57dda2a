"""A chat template's omissions from a conversation, found by rendering it with and without a field.

No field is known by name. A template that renders the same text without a field does not read it.
"""

from collections.abc import Callable, Iterator
from typing import Any

from pipeline.conversations import Messages

Render = Callable[[Messages], str]
"""The text of messages; raises ValueError if the template fails."""


def remedy(template: str) -> str:
    """Return the advice to use another template; `template` completes "a chat_template.jinja that"."""
    return f"name a folder of the tokenizer's files and a chat_template.jinja that {template} with model.tokenizer_path"


class Omissions:
    """Finds fields of messages that change nothing in the rendering.

    Contents, tool calls and everything else with content in an assistant's message must be written in every row. Other
    fields, such as the name of a user, are noted once.
    """

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}
        """Sentences on fields that are left out, or read otherwise than they may look."""
        self._tested: set[tuple[str, bool, str]] = set()

    def note(self, sentence: str) -> None:
        """Keep a sentence for the plan, once; an empty one is none."""
        if sentence:
            self.notes[sentence] = None

    def check(self, messages: Messages, text: str, render: Render, place: str, start: int = 0) -> None:
        """Check a conversation.

        Args:
            messages: the conversation, as from `read_messages`.
            text: its rendering.
            render: without an opening of a further turn.
            place: beginning of the error.
            start: number of the first message to look at.

        Raises:
            ValueError: the template leaves out a field that must be written.
        """
        for number, message in enumerate(messages[start:], start):
            role = message["role"]
            for name, value in message.items():
                key = role, "tool_calls" in message, name
                said = name in ("content", "tool_calls")
                said = said or (role == "assistant" and isinstance(value, str | list | dict))
                known = key in self._tested and (not said or (name == "content" and value.strip() in text))
                if name == "role" or known or not _says(value):
                    continue
                self._tested.add(key)
                left_out = any(_changes_nothing(messages, number, other, render) for other in _without(message, name))
                if left_out and said:
                    raise ValueError(
                        f"{place}: the model's chat template leaves out `{name}` of message {number} (role {role}), "
                        f"which is {value!r:.80}; remove it, move its text to a place that the template reads, or "
                        f"{remedy('writes it')}"
                    )
                if left_out:
                    self.notes[f"the model's chat template leaves out `{name}` of messages of role {role}"] = None


def check_answer(messages: Messages, text: str, render: Render, place: str) -> None:
    """Refuse an answer whose beginning or end a template leaves out, such as its thinking.

    Args:
        messages: the conversation up to the answer.
        text: its rendering.
        render: as for `Omissions.check`.
        place: beginning of the error.

    Raises:
        ValueError: the template leaves out a part.
    """
    *before, answer = messages
    content = answer["content"].strip()
    if not content or content in text:
        return
    for part, what in ((content[1:], "beginning"), (content[:-1], "end")):
        try:
            left_out = render([*before, {**answer, "content": part}]) == text
        except ValueError:
            left_out = False
        if left_out:
            raise ValueError(
                f"{place}: the model's chat template leaves out the {what} of the answer {content!r:.80}; remove it, "
                f"or {remedy('writes the whole answer')}"
            )


def _says(value: Any) -> bool:
    """Return whether a field has content."""
    if isinstance(value, str):
        return bool(value.strip())
    return bool(value) if isinstance(value, list | dict) else value is not None


def _without(message: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield the message without a field, without each of its calls, and without the arguments of its calls."""
    rest = {key: value for key, value in message.items() if key != name}
    if name == "content":
        yield {**message, "content": ""}
    elif name != "tool_calls":
        yield rest
    else:
        calls = message[name]
        for number in range(len(calls)):
            others = calls[:number] + calls[number + 1 :]
            yield {**rest, name: others} if others else rest
        if any(call["function"]["arguments"] for call in calls):
            bare = [{**call, "function": {**call["function"], "arguments": {}}} for call in calls]
            yield {**message, name: bare}


def _changes_nothing(messages: Messages, number: int, other: dict[str, Any], render: Render) -> bool:
    """Return whether the text is the same with `other` instead of a message.

    The text of all messages counts, and the text up to this one: some templates leave reasoning out of earlier answers,
    others write the system's message only with a user's.
    """
    rendered = False
    for end in {number + 1, len(messages)}:
        try:
            text = render(messages[:end])
        except ValueError:
            continue
        rendered = True
        try:
            if render([*messages[:number], other, *messages[number + 1 : end]]) != text:
                return False
        except ValueError:
            # The template requires it.
            return False
    return rendered


def check_tools(tools: Messages, text: str, without: Callable[[], str], place: str) -> None:
    """Refuse tools that a template leaves out.

    Args:
        tools: schemas.
        text: a conversation with them.
        without: renders it without them.
        place: beginning of the error.

    Raises:
        ValueError: the template leaves them out.
    """
    names = [str((tool.get("function") or tool).get("name")) for tool in tools]
    if not all(name in text for name in names) or without() == text:
        raise ValueError(
            f"{place}: the model's chat template leaves out the tools ({', '.join(names):.200}); remove them, or "
            f"{remedy('writes them')}"
        )
