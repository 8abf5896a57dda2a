"""Conversations in the forms of other people's files, as chat templates take them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from pipeline.cells import values
from pipeline.conversations import may_be_messages, read_messages, read_tools, rendered

ASK = {"role": "user", "content": "weather?"}


def called(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def cells(tmp_path: Path, rows: list[Any]) -> list[Any]:
    pq.write_table(pa.table({"c": rows}), tmp_path / "f.parquet")
    return [row["c"] for row in values(pq.read_table(tmp_path / "f.parquet"))]


def test_a_history_of_calls_has_no_nulls_of_other_rows(tmp_path: Path) -> None:
    rows = [
        [ASK, {"role": "assistant", "content": None, "tool_calls": [called("weather", {"city": "Ulm"})]}],
        [ASK, {"role": "assistant", "content": "", "tool_calls": [called("convert", {"value": 12, "unit": "F"})]}],
        [{"role": "user", "content": "Hi", "name": "Ann"}],
    ]
    expected = [
        [ASK, {"role": "assistant", "content": "", "tool_calls": [called("weather", {"city": "Ulm"})]}],
        rows[1],
        rows[2],
    ]
    assert [read_messages(cell, "here") for cell in cells(tmp_path, rows)] == expected
    assert [read_messages(json.dumps(row), "here") for row in rows] == expected
    for messages in expected:
        assert read_messages(messages, "here") == messages


def test_arguments_are_objects_with_the_nulls_that_were_written(tmp_path: Path) -> None:
    nested = {"city": None, "days": [1, None], "at": {"hour": None}}
    for arguments in (nested, json.dumps(nested)):
        [cell] = cells(tmp_path, [json.dumps([{"role": "assistant", "tool_calls": [called("f", arguments)]}])])
        [message] = read_messages(cell, "here")
        assert message == {"role": "assistant", "content": "", "tool_calls": [called("f", nested)]}
    for nothing in (None, "", "{}", {}):
        [message] = read_messages([{"role": "assistant", "tool_calls": [called("f", nothing)]}], "here")
        assert message["tool_calls"] == [called("f", {})]
    kind = pa.map_(pa.string(), pa.string())
    struct = pa.StructArray.from_arrays([pa.array(["f"]), pa.array([[("city", "Ulm")]], kind)], ["name", "arguments"])
    calls = pa.StructArray.from_arrays([struct], ["function"])
    [row] = values(pa.table({"c": calls}))
    [message] = read_messages([{"role": "assistant", "tool_calls": [row["c"]]}], "here")
    assert message["tool_calls"] == [called("f", {"city": "Ulm"})]


def test_forms_of_calls() -> None:
    flat = {"role": "assistant", "content": "x", "tool_calls": [{"name": "f", "arguments": '{"a": 1}', "id": "c"}]}
    whole = {"role": "assistant", "content": "x", "tool_calls": json.dumps([called("f", '{"a": 1}', id="c")])}
    for message in (flat, whole):
        [read] = read_messages([message], "here")
        assert read["tool_calls"] == [called("f", {"a": 1}, id="c")]
    assert read_messages([ASK | {"tool_calls": None}, ASK | {"tool_calls": []}], "here") == [ASK, ASK]


def test_openais_rows(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    row = [
        ASK,
        {"role": "assistant", "tool_calls": [called("f", '{"location": "Ulm"}', id="call_1")]},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
        },
        {"role": "assistant", "content": "12", "weight": 1, "name": "b"},
    ]
    read = read_messages(json.dumps(row), "here")
    assert read[2] == {"role": "tool", "tool_call_id": "call_1", "content": "12"}
    assert read[1]["tool_calls"] == [called("f", {"location": "Ulm"}, id="call_1")] and read[3] == row[3]
    as_text = {"type": "function", "function": {**tool["function"], "parameters": json.dumps({"type": "object"})}}
    assert read_tools(json.dumps([tool]), "here") == read_tools([json.dumps(tool)], "here") == [tool]
    assert read_tools([as_text], "here")[0]["function"]["parameters"] == {"type": "object"}
    assert [read_tools(nothing, "here") for nothing in (None, "", [], "[]", "null")] == [None] * 5


def test_schemas_have_no_nulls_of_other_tools_and_keep_those_that_were_written(tmp_path: Path) -> None:
    schemas = [
        {"name": "f", "parameters": {"a": {"type": "string"}}},
        {"name": "g", "parameters": {"b": {"enum": ["x"]}}},
    ]
    [cell] = cells(tmp_path, [schemas])
    assert read_tools(cell, "here") == schemas
    assert read_tools('[{"name": "f", "default": null}]', "here") == [{"name": "f", "default": None}]


def test_arrays_of_pandas() -> None:
    parts = np.array([{"type": "text", "text": "hi"}], dtype=object)
    assert read_messages(np.array([{"role": "user", "content": parts}], dtype=object), "here") == [
        {"role": "user", "content": "hi"}
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None is not a list of messages"),
        ([], r"\[\] is not a list of messages"),
        ({"messages": [ASK]}, "is not a list of messages"),
        ("What is 1+1?", r"not JSON .*: What is 1\+1\?; a list or an object is needed"),
        ([{"from": "human", "value": "Hi"}], r"message 0 has no role that is text: \{'from': 'human', .*write"),
        (
            [ASK, {"role": "assistant", "content": None, "function_call": {"name": "f"}}],
            "message 1 has no content: .*func",
        ),
        ([{"role": "user", "content": 5}], "message 0: `content` must be a text, .* and is 5"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "has a part of type 'image_url'; only",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0: .* has a part {'type': 'text'}"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}], "without the name of a function"),
        ([{"role": "assistant", "tool_calls": [called("f", "[1]")]}], "arguments of f that are not an object"),
        ([{"role": "assistant", "tool_calls": [called("f", "{")]}], "arguments of f: not JSON"),
    ],
)
def test_what_is_no_conversation_is_refused(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"^here: .*{words}"):
        read_messages(value, "here")


def test_types_that_may_hold_messages() -> None:
    message = pa.struct([("role", pa.string()), ("content", pa.list_(pa.struct([("type", pa.string())])))])
    good = [pa.string(), pa.large_string(), pa.json_(), pa.list_(message), pa.large_list(message), pa.list_(pa.json_())]
    assert all(may_be_messages(kind) for kind in [*good, pa.list_(pa.map_(pa.string(), pa.string()))])
    texts = pa.struct([("role", pa.string()), ("text", pa.string())])
    assert not any(may_be_messages(kind) for kind in (pa.int64(), pa.list_(pa.string()), message, pa.list_(texts)))


@pytest.mark.parametrize(
    "call",
    [
        "{{ f.name }}{{ f.arguments }}",
        "{{ f.name }}{{ '' + f.arguments }}",
        "{{ f.name }}{{ f.arguments | tojson }}",
        "{% if m.content is none %}{{ f.name }}{{ '' + f.arguments }}{% endif %}",
    ],
)
def test_templates_that_read_other_forms_of_calls_get_them(call: str) -> None:
    template = f"{{% for m in messages %}}{{% set f = m.tool_calls[0].function %}}{call}{{% endfor %}}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)

    def render(messages: list[dict[str, Any]]) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:
            raise ValueError(str(error)) from error

    for given in ({"city": "Köln", "days": None}, {}, {"it's": 1}):
        messages = [{"role": "assistant", "content": "", "tool_calls": [called("f", given)]}]
        assert rendered(messages, render) == "f" + json.dumps(given, ensure_ascii=False)
    with pytest.raises(ValueError, match="tool_calls"):
        rendered([{"role": "user", "content": ""}], render)


def test_calls_that_no_form_writes_are_rendered_as_they_are_or_fail() -> None:
    messages = [{"role": "assistant", "content": "x", "tool_calls": [called("f", {"a": 1})]}]
    assert rendered(messages, lambda some: some[0]["content"]) == "x"

    def fail(messages: list[dict[str, Any]]) -> str:
        raise ValueError(f"no {messages[0]['tool_calls'][0]['function']['arguments']}")

    with pytest.raises(ValueError, match="no {'a': 1}"):
        rendered(messages, fail)


def test_names_that_stand_elsewhere_do_not_count_as_written_calls() -> None:
    messages = [{"role": "assistant", "content": "", "tool_calls": [called("f", {"a": 1})]}]

    def render(some: list[dict[str, Any]]) -> str:
        calls = some[0].get("tool_calls", []) if some[0]["content"] is None else []
        return "of" + "".join(call["function"]["arguments"] for call in calls)

    assert rendered(messages, render) == 'of{"a": 1}'
