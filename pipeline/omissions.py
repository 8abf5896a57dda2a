"""Find parts of a conversation that a chat template leaves out, by rendering it with and without a field.

If the text is the same without a field, the template does not read it. Fields are not known by name.
"""

from collections.abc import Callable, Iterator
from typing import Any

from pipeline.conversations import Messages

Render = Callable[[Messages], str]
"""Function that renders messages as text; raises ValueError if the template fails."""


def remedy(template: str) -> str:
    """Return the advice to use another template; `template` completes "a chat_template.jinja that"."""
    return f"name a folder of the tokenizer's files and a chat_template.jinja that {template} with model.tokenizer_path"


class Omissions:
    """Finds fields of messages that a chat template leaves out.

    Content, tool calls and all other text in assistant messages must be written, else `check` raises. Other fields that
    are left out, such as the name of a user, are only noted, once.
    """

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}
        """Sentences on parts of prompts that are left out or read in an unexpected way, as keys."""
        self._tested: set[tuple[str, bool, str]] = set()

    def note(self, sentence: str) -> None:
        """Add a sentence to `notes`, if it is new and not empty."""
        if sentence:
            self.notes[sentence] = None

    def check(self, messages: Messages, text: str, render: Render, place: str, start: int = 0) -> None:
        """Check a conversation.

        Args:
            messages: the conversation, as from `read_messages`.
            text: the rendered conversation.
            render: renders messages without opening a further turn.
            place: beginning of the error text.
            start: number of the first message to check, from 0.

        Raises:
            ValueError: the template leaves out a field that must be written.
        """
        for number, message in enumerate(messages[start:], start):
            role = message["role"]
            for name, value in message.items():
                key = role, "tool_calls" in message, name
                said = name in ("content", "tool_calls")
                said = said or (role == "assistant" and isinstance(value, str | list | dict))
                known = key in self._tested and (
                    not said or (name == "content" and isinstance(value, str) and value.strip() in text)
                )
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
    """Check that a template does not leave out the beginning or the end of the last message, such as its thinking.

    Args:
        messages: the conversation; its last message is the one to check.
        text: the rendered conversation.
        render: renders messages without opening a further turn.
        place: beginning of the error text.

    Raises:
        ValueError: the template leaves out the beginning or the end.
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
    """Return True if the value of a field is not empty."""
    if isinstance(value, str):
        return bool(value.strip())
    return bool(value) if isinstance(value, list | dict) else value is not None


def _without(message: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield variants of the message without the field `name`; for tool calls, without each call and without all
    arguments."""
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
    """Return True if the rendered text is the same with `other` in place of message `number`.

    Both the whole conversation and the conversation up to this message are compared: some templates leave out reasoning
    of earlier turns, others write the system message only if a user message follows.
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
    """Check that a template writes the schemas of tools.

    Args:
        tools: schemas of the tools.
        text: a conversation that was rendered with the tools.
        without: renders the same conversation without the tools.
        place: beginning of the error text.

    Raises:
        ValueError: the template leaves out the tools.
    """
    names = [str((tool.get("function") or tool).get("name")) for tool in tools]
    if not all(name in text for name in names) or without() == text:
        raise ValueError(
            f"{place}: the model's chat template leaves out the tools ({', '.join(names):.200}); remove them, or "
            f"{remedy('writes them')}"
        )
