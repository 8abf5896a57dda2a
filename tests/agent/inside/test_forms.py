"""Messages in OpenAI's form and in that of the column `messages`."""

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.agent import Call, Message
from pipeline.agent.inside.forms import (
    NEW_CONTEXT,
    as_recorded,
    for_template,
    joined,
    prompt_length,
    recorded,
    split,
    tool_call,
)

PIPELINE = Path(__file__).resolve().parents[3] / "pipeline"


def test_an_answer_goes_from_one_form_to_the_other_and_back() -> None:
    calls = [Call("any", "calc", {"x": "é"}), Call("other", "get", {})]
    said = as_recorded(Message("Yes.", "Hm.", calls))
    made = [{"name": "calc", "arguments": {"x": "é"}}, {"name": "get", "arguments": {}}]
    assert said == {"role": "assistant", "content": "Yes.", "reasoning": "Hm.", "calls": made}
    shown = for_template(said)
    assert shown.pop("reasoning_content") == "Hm."
    assert shown == {
        "role": "assistant",
        "content": "Yes.",
        "tool_calls": [
            {"id": f"call0000{number}", "type": "function", "function": call} for number, call in enumerate(made)
        ],
    }
    assert recorded([shown]) == [{"role": "assistant", "content": "Yes.", "calls": made}]
    plain = {"role": "tool", "tool_call_id": "call00000", "name": "calc", "content": "12"}
    assert for_template(plain) == plain == recorded([plain])[0]


def test_conversations_of_a_row_can_be_told_apart() -> None:
    ask, say = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    for talks in ([[ask, say]], [[ask, say], [ask, say, ask, say], [say]]):
        row = joined(talks)
        assert [message | {NEW_CONTEXT: True} for message in row] != row and split(row) == talks
        assert [{key: message[key] for key in ("role", "content")} for message in row] == sum(talks, [])
    assert NEW_CONTEXT not in ask and split([]) == [[]]
    marked = ask | {NEW_CONTEXT: True}
    assert split(joined([[marked, marked, say], [marked, say]])) == [[ask, ask, say], [ask, say]]


@pytest.mark.parametrize(("prompt", "length"), [([], 0), (1, 1), (2, 2), ([{"role": "user", "content": "other"}], 0)])
def test_the_prompt_of_a_row_may_begin_a_conversation(prompt: Any, length: int) -> None:
    call = tool_call("x", "calc", {})
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    talk = [*recorded(asked), {"role": "tool", "content": "12"}]
    assert prompt_length(talk, asked[:prompt] if isinstance(prompt, int) else prompt) == length


def test_calls_are_written_in_one_place() -> None:
    writes = re.compile(r'"id":[^{}]*"type": "function"')
    assert [path.name for path in PIPELINE.rglob("*.py") if writes.search(path.read_text())] == ["forms.py"]
