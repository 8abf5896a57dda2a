"""What chat templates leave out, in the manner of several families."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from pipeline.omissions import Omissions, check_answer, check_tools

# Reads roles and contents alone, as SmolLM2's.
PLAIN = """\
{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Writes calls, and reasoning behind the last user, as Qwen3's.
REASONING = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""

# One call for an answer, without content; results are quoted; other roles raise, as in Llama 3.
SINGLE = """\
{%- for m in messages %}<|start|>{{ m.role }}<|end|>
{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}({{ m.tool_calls[0].function.arguments | tojson }})
{%- elif m.role == 'tool' %}{{ m.content | tojson }}
{%- elif m.role in ('user', 'assistant', 'system') %}{{ m.content }}
{%- else %}{{ raise_exception('unknown role') }}{% endif %}<|eot|>{% endfor %}"""

# Knows users and assistants.
TWO_ROLES = """\
{%- for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"""

# The system's message stands in the user's that follows, as in Gemma 3, or in the last one, as in Mistral.
SYSTEM_WITH_FIRST = """\
{%- set system = messages[0].content + ' ' if messages[0].role == 'system' else '' %}
{%- for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ system if loop.first }}{{ m.content }}{% endfor %}"""
SYSTEM_WITH_LAST = SYSTEM_WITH_FIRST.replace("loop.first", "loop.last and m.role == 'user'")

# Leaves thinking out of all answers, as DeepSeek-R1's.
WITHOUT_THINKING = PLAIN.replace("m['content']", "m['content'].split('</think>')[-1]")

NAMES_ALONE = PLAIN.replace(
    "<|im_end|>", "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<|im_end|>"
)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ASK = {"role": "user", "content": "weather?"}
RESULT = {"role": "tool", "content": 'a "12"'}


def answer(content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def renderer(template: str, **arguments: Any) -> Callable[[list[dict[str, Any]]], str]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)

    def render(messages: list[dict[str, Any]]) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
        except Exception as error:
            raise ValueError(str(error)) from error

    return render


def look(template: str, *messages: dict[str, Any], found: Omissions | None = None) -> list[str]:
    found, render = found or Omissions(), renderer(template)
    found.check(list(messages), render(list(messages)), render, "f, row 0")
    return list(found.notes)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (PLAIN, [{"role": "system", "content": "s"}, ASK, answer("y"), ASK, answer("")]),
        (REASONING, [ASK, answer(tool_calls=[call("f", x=1), call("f", x=1)]), RESULT, answer("y")]),
        # Left out by design, behind a further question.
        (REASONING, [ASK, answer("x", reasoning_content="hm"), ASK, answer("y", reasoning_content="hm")]),
        (SINGLE, [ASK, answer(tool_calls=[call("f")]), RESULT, answer("y")]),
        (TWO_ROLES, [ASK, answer("y"), ASK]),
        (PLAIN, [ASK, answer("y", tags=[], note="", score=None)]),
        (SYSTEM_WITH_FIRST, [{"role": "system", "content": "s"}, ASK, answer("y"), ASK]),
        (SYSTEM_WITH_LAST, [{"role": "system", "content": "s"}, ASK, answer("y"), ASK]),
        (WITHOUT_THINKING, [ASK, answer("<think>hm</think>y"), ASK]),
    ],
)
def test_conversations_that_are_written_as_a_whole(template: str, messages: list[dict[str, Any]]) -> None:
    assert look(template, *messages) == []


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (PLAIN, [ASK, answer("y", thinking="12+2")], "`thinking` of message 1 .role assistant., which is '12.2'"),
        # The text of the field stands elsewhere, too.
        (PLAIN, [ASK, answer("12", thoughts="1")], "`thoughts` of message 1"),
        (REASONING, [ASK, answer("y", thinking="a", reasoning_content="b")], "`thinking` of message 1"),
        (PLAIN, [ASK, answer(tool_calls=[call("f")]), RESULT], "`tool_calls` of message 1"),
        (PLAIN, [ASK, answer("y"), ASK, answer("f", tool_calls=[call("f", x=1)])], "`tool_calls` of message 3"),
        (NAMES_ALONE, [ASK, answer(tool_calls=[call("f", x=1)])], "`tool_calls` of message 1"),
        (SINGLE, [ASK, answer(tool_calls=[call("f"), call("g")])], "`tool_calls` of message 1"),
        (SINGLE, [ASK, answer("Let me look.", tool_calls=[call("f")])], "`content` of message 1"),
        (TWO_ROLES, [{"role": "system", "content": "Short."}, ASK, answer("y")], "`content` of message 0 .role system"),
        (SYSTEM_WITH_LAST, [{"role": "system", "content": "s"}, ASK, answer("y")], "`content` of message 0"),
        (TWO_ROLES, [ASK, answer("weather"), {"role": "tool", "content": "weather"}], "`content` of message 2"),
    ],
)
def test_what_is_said_and_left_out_is_refused(template: str, messages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ValueError, match=f"^f, row 0: the model's chat template leaves out {words}.*tokenizer_path"):
        look(template, *messages)


def test_later_rows_are_looked_at_too() -> None:
    found = Omissions()
    look(REASONING, ASK, answer("y", reasoning_content="hm"), found=found)
    look(REASONING, ASK, answer("y", tool_calls=[call("f")]), found=found)
    with pytest.raises(ValueError, match="leaves out `thinking`"):
        look(REASONING, ASK, answer("y", reasoning_content="hm", thinking="hm"), found=found)
    look(SINGLE, ASK, answer(tool_calls=[call("f")]), found=found)
    with pytest.raises(ValueError, match="leaves out `content` of message 1"):
        look(SINGLE, ASK, answer("so", tool_calls=[call("f")]), found=found)


def test_other_fields_are_noted_once() -> None:
    found = Omissions()
    for _ in range(2):
        notes = look(PLAIN, ASK | {"name": "Ann"}, answer("y", score=0.5), RESULT | {"tool_call_id": "1"}, found=found)
    assert [note.partition("leaves out ")[2] for note in notes] == [
        "`name` of messages of role user",
        "`score` of messages of role assistant",
        "`tool_call_id` of messages of role tool",
    ]


def test_messages_before_the_first_to_look_at() -> None:
    render, messages = renderer(PLAIN), [ASK, answer("y", thinking="x"), ASK, answer("z")]
    Omissions().check(messages, render(messages), render, "here", 2)


def test_tools_that_are_left_out_are_refused() -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    for template, words in ((REASONING, None), (PLAIN, r"leaves out the tools \(weather\).*tokenizer_path")):
        with_tools, without = renderer(template, tools=tools)([ASK]), renderer(template)
        if words is None:
            check_tools(tools, with_tools, lambda without=without: without([ASK]), "here")
            continue
        with pytest.raises(ValueError, match=words):
            check_tools(tools, with_tools, lambda without=without: without([ASK]), "here")


@pytest.mark.parametrize(
    ("template", "content", "what"),
    [
        (WITHOUT_THINKING, "<think>4 is y</think> 4 is y", "beginning"),
        (PLAIN.replace("m['content']", "m['content'].split('ENDE')[0]"), "y ENDE z", "end"),
        (WITHOUT_THINKING, " y </think ", None),
        (PLAIN.replace("m['content']", "m['content'] | trim"), "\n<think>hm</think>y\n", None),
        (PLAIN.replace("m['content']", "m['content'] | tojson"), 'a "12"', None),
        (PLAIN, "", None),
    ],
)
def test_answers_that_are_written_in_part_are_refused(template: str, content: str, what: str | None) -> None:
    render, messages = renderer(template), [ASK, answer(content)]
    if what is None:
        return check_answer(messages, render(messages), render, "f, row 0")
    with pytest.raises(ValueError, match=f"^f, row 0: .* leaves out the {what} of the answer .*tokenizer_path"):
        check_answer(messages, render(messages), render, "f, row 0")
