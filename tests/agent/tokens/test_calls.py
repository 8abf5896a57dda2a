"""Answers read by vLLM's parsers in this process; importing them takes seconds, so these tests count as slow."""

import json
import logging
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.agent import Call
from pipeline.agent.arguments import mistake
from pipeline.agent.tokens.bridge import Bridge
from pipeline.agent.tokens.calls import AnswerParser, why
from tests.agent.families import CALC, FAMILIES, TOOLS, tokenizer
from tests.agent.hostile_values import LITERALS
from tests.agent.hostile_values import call as hostile
from tests.bounds import bounded

pytestmark = [pytest.mark.slow]


def bridge(name: str, tools: list[dict] = TOOLS, **template_kwargs: Any) -> Bridge:
    roles = {"user", "tool"} if FAMILIES[name].tool else {"user"}
    return Bridge.prove(tokenizer(name), template_kwargs, roles, tools)


def reader(name: str, parser: str = "auto", reasoning: str = "none", tools: list[dict] = TOOLS) -> AnswerParser:
    return AnswerParser.prove(tokenizer(name), tools, parser, reasoning, bridge(name, tools))


@pytest.fixture(scope="module")
def hermes() -> AnswerParser:
    return reader("chatml")


def ids_of(made: AnswerParser, text: str) -> list[int]:
    return made.tokenizer.encode(text, add_special_tokens=False)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def test_auto_takes_the_parser_of_the_template(hermes: AnswerParser) -> None:
    assert hermes.summary() == "tool parser hermes, proven on 2 tools; reasoning parser none"
    assert reader("thinking").parser == "hermes"
    assert reader("unclosed").parser == "glm47"
    assert reader("instruct").parser == "mistral"


def test_without_vllm_its_parsers_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="agent.parser=auto: .* vLLM is not installed here"):
        reader("chatml")
    with pytest.raises(ValueError, match="agent.reasoning_parser=qwen3: .* vLLM is not installed here"):
        reader("chatml", parser="none", reasoning="qwen3")
    assert reader("chatml", parser="none").parser == "none"


def test_a_call_is_read_and_what_stands_around_it_is_kept(hermes: AnswerParser) -> None:
    text = "Let me see.\n" + call("calc", '{"expression": "1 + é", "digits": 3}')
    for end in ("", "<|im_end|>"):
        message, problem = hermes.read(ids_of(hermes, text + end), truncated=False)
        assert problem is None
        assert message.calls == [Call("call00000", "calc", {"expression": "1 + é", "digits": 3})]
        assert message.text.strip() == "Let me see." and message.reasoning == "" and not message.truncated
    message, problem = hermes.read(ids_of(hermes, call("calc", "{}") + call("unknown", "{}")), truncated=True)
    assert [made.name for made in message.calls] == ["calc", "unknown"] and problem is None and message.truncated
    assert message.calls[0].id != message.calls[1].id


def test_an_answer_without_a_call_is_its_text(hermes: AnswerParser) -> None:
    for text in ("Four.", "", '{"name": "calc"}', "a < b, [1, 2]"):
        message, problem = hermes.read(ids_of(hermes, text + "<|im_end|>"), truncated=False)
        assert (message.text, message.calls, problem) == (text, [], None)


def test_without_tools_nothing_of_vllm_is_needed() -> None:
    made = reader("chatml", tools=[])
    text = call("calc", "{}")
    assert made.read(ids_of(made, text + "<|im_end|>"), truncated=True)[0].text == text
    assert made.read(ids_of(made, text), truncated=True)[0].truncated
    assert made.summary() == "tool calls are not read; reasoning parser none"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>\n{"name": "calc", }\n</tool_call>', "behind <tool_call>: its JSON is not valid: .*line 1"),
        ("<tool_call>calc(1)</tool_call>", "no tool call can be read behind <tool_call>$"),
        ('<tool_call>{"name": "calc"}</tool_call>', "no tool call can be read"),
        (call("calc", "[1]"), "arguments of calc are of type list, not an object"),
        (call("calc", "NaN"), "NaN is no JSON"),
        (call("calc", '{"digits": Infinity}'), "Infinity is no JSON"),
        (
            call("calc", '{"digits": 1e999}'),
            "arguments of calc are not valid JSON: (1e999 is more|Infinity is no JSON)",
        ),
        (call("calc", '{"digits": ' + "9" * 5000 + "}"), "cannot be read|no tool call can be read|not valid JSON"),
        (call("", "{}"), "call 1 has no name"),
        (call("calc", '{"expression": "\\ud800"}'), "lone surrogate"),
        (call("calc", '{"a": ' + "[" * 80 + "]" * 80 + "}"), "nested more than 64 levels"),
        ("<tool_call>" + "[" * 10_000, "nested too deep"),
        ("<tool_call>" * 100, "<tool_call> 100 times, more than 64"),
        ("<tool_call>" + "a" * 70_000, "70011 characters; calls are read in answers of up to 65536"),
        (call("calc", "{}") + "<tool_call>{", "no tool call can be read"),
    ],
)
def test_a_call_that_cannot_be_read_is_said_in_words(
    hermes: AnswerParser, caplog: pytest.LogCaptureFixture, text: str, reason: str
) -> None:
    vllm = logging.getLogger("vllm")
    vllm.addHandler(caplog.handler)
    try:
        with bounded():
            message, problem = hermes.read(ids_of(hermes, text), truncated=False)
    finally:
        vllm.removeHandler(caplog.handler)
    assert message.calls == [] and message.text
    assert problem is not None and len(problem) < 600
    assert re.search(reason, problem), problem
    assert not caplog.records


def test_an_answer_cut_within_a_call_says_so(hermes: AnswerParser) -> None:
    _, problem = hermes.read(ids_of(hermes, '<tool_call>\n{"name": "calc", "argu'), truncated=True)
    assert problem == "the answer was cut at its length limit within a tool call"


def test_the_mark_of_a_call_within_arguments_is_no_call(hermes: AnswerParser) -> None:
    text = call("calc", '{"expression": "<tool_call> 1"}')
    message, problem = hermes.read(ids_of(hermes, text), truncated=False)
    assert problem is None and message.calls[0].arguments == {"expression": "<tool_call> 1"}


def test_a_call_that_a_parser_drops_is_malformed() -> None:
    made = reader("unclosed")
    good = "<tool_call>calc\n<arg_key>expression</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    message, problem = made.read(ids_of(made, good), truncated=False)
    assert problem is None and message.calls[0].arguments == {"expression": "1"}
    message, problem = made.read(ids_of(made, good + "<tool_call></tool_call>"), truncated=False)
    assert message.calls == [] and problem == "the answer holds <tool_call> 2 times, but 1 calls can be read"


def test_a_megabyte_is_read_in_bounded_time(hermes: AnswerParser) -> None:
    ids = ids_of(hermes, " higher") * 150_000
    with bounded(120):
        message, problem = hermes.read(ids, truncated=True)
        assert problem is None and len(message.text) == 1_050_000
        _, problem = hermes.read([*ids_of(hermes, "<tool_call>"), *ids], truncated=True)
        assert problem is not None and "characters" in problem


GARBAGE = st.lists(
    st.one_of(
        st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "calc", "arguments": {}}', "{", "}", "[", "]", '"']),
        st.sampled_from(["<think>", "</think>", "<|im_end|>", "<|im_start|>", "\\", ",", ":", '"name"', "null", "\n"]),
        st.text(max_size=5),
        st.sampled_from([hostile(literal) for literal in LITERALS if len(literal) < 500]),
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("name", ["chatml", "headers", "instruct", "unclosed"])
def test_hostile_values_in_calls_are_at_worst_mistakes(name: str) -> None:
    """They stand where the model's own template writes an argument."""
    made = reader(name)
    ids, (said,) = made._probes()[0]
    text = made._decode(ids, skip=False)
    written = json.dumps(said.arguments["expression"], ensure_ascii=False)
    written = written if written in text else said.arguments["expression"]
    assert written in text
    for literal in (literal for literal in LITERALS if len(literal) < 6000):
        answer = text.replace(written, literal).encode("utf-8", "replace").decode()
        with bounded():
            message, problem = made.read(ids_of(made, answer), truncated=False)
        assert problem is None or len(problem) < 1000
        json.dumps([each.arguments for each in message.calls], ensure_ascii=False, allow_nan=False).encode()
        for each in message.calls:
            told = mistake(
                {"function": {"name": each.name, "parameters": {"additionalProperties": True}}}, each.arguments
            )
            assert told is None or "numbers of at most" in told or "nested" in told


@settings(max_examples=300)
@given(text=GARBAGE, truncated=st.booleans())
def test_no_answer_raises(hermes: AnswerParser, text: str, truncated: bool) -> None:
    valid = text.encode("utf-8", "replace").decode()
    message, problem = hermes.read(ids_of(hermes, valid), truncated)
    assert message.truncated == truncated
    assert not (problem and message.calls)
    if "<tool_call>" in valid:
        assert problem or message.calls
    json.dumps([message.text, message.reasoning, [made.arguments for made in message.calls]]).encode()


def test_a_parser_that_does_not_fit_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="agent.parser=qwen3_coder: .*does not: .*These do: .*hermes"):
        reader("chatml", "qwen3_coder")
    with pytest.raises(ValueError, match="agent.parser=nonsense: .*not.*These do: .*hermes"):
        reader("chatml", "nonsense")


def test_a_template_without_calls_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves out the tool calls.* model.tokenizer_path"):
        AnswerParser.prove(tokenizer("alternating"), TOOLS, "auto", "none", bridge("alternating"))


def test_reasoning_is_taken_out_of_the_text() -> None:
    made = reader("thinking", reasoning="qwen3")
    assert made.summary() == "tool parser hermes, proven on 2 tools; reasoning parser qwen3"
    text = "<think>\nI will call calc.\n</think>\n\nNow." + call("calc", "{}")
    message, problem = made.read(ids_of(made, text), truncated=False)
    assert problem is None
    assert message.reasoning.strip() == "I will call calc."
    assert message.text.strip() == "Now." and message.calls[0].name == "calc"
    alone = reader("thinking", "none", "qwen3")
    message, problem = alone.read(ids_of(alone, text), truncated=False)
    assert message.reasoning and "<tool_call>" in message.text and problem is None


def test_reasoning_parsers_are_proven_too() -> None:
    with pytest.raises(ValueError, match="agent.reasoning_parser=nonsense is none of.*qwen3"):
        reader("thinking", reasoning="nonsense")
    with pytest.raises(ValueError, match="agent.reasoning_parser=deepseek_r1 cannot be used with this model"):
        reader("chatml", reasoning="deepseek_r1")


def test_arguments_of_all_kinds_are_read_back() -> None:
    kinds = {
        "text": "string",
        "count": "integer",
        "ratio": "number",
        "flag": "boolean",
        "list": "array",
        "map": "object",
    }
    parameters = {"type": "object", "properties": {name: {"type": kind} for name, kind in kinds.items()}}
    tool = {"type": "function", "function": {"name": "all", "parameters": parameters}}
    made = reader("chatml", tools=[tool, CALC])
    ids, (expected,) = made._probes()[0]
    assert set(expected.arguments) == set(kinds)
    assert made.read(ids, truncated=False)[0].calls == [expected]


def test_what_is_wrong_with_json() -> None:
    assert why("plain") == "" and why(' {"a": 1} x') == ""
    assert "line 1 column 2" in why("{a")
