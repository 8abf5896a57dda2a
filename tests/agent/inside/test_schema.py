"""Schemas of tools, and what the model reads about arguments that do not fit."""

from typing import Any, Dict, List, Literal, Optional, Union  # noqa: UP035

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.agent.inside.schema import mistake, schema_of, whole
from pipeline.agent.tokens.calls import example
from tests.agent.hostile_values import NAMES, SCHEMAS, VALUES
from tests.bounds import bounded


def search(query: str, limit: int = 5, exact: bool = False, kinds: Optional[list[str]] = None) -> str:  # noqa: UP045
    """Find pages.

    The best come first.

    Args:
        query: words to look for,
            such as "red cars".
        limit: how many pages.
        exact: whether all words must be there.
        kinds: kinds of pages.

    Returns:
        titles.
    """
    return ""


def move(way: Literal["up", "down"], by: int | float, by_name: dict[str, int], anything: Any) -> None:
    """Move.

    Args:
        way: direction.
        by: steps.
        by_name: names.
        anything: else.
    """


@pytest.mark.parametrize("function", [search, move])
def test_a_schema_is_the_one_of_transformers(function: Any) -> None:
    from transformers.utils import get_json_schema

    expected = get_json_schema(function)
    expected["function"].pop("return", None)
    assert schema_of(function) == expected


def test_a_tool_without_parameters_and_one_with_a_union_of_lists() -> None:
    def now() -> str:
        """The time."""
        return ""

    def total(values: Union[list[int], str]) -> str:  # noqa: UP007
        """The sum."""
        return ""

    assert schema_of(now)["function"] == {
        "name": "now",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {}},
    }
    lists = {"type": "array", "items": {"type": "integer"}}
    assert schema_of(total)["function"]["parameters"]["properties"]["values"] == {"anyOf": [lists, {"type": "string"}]}


def test_lists_and_objects_of_anything() -> None:
    def look(a: list, b: List, c: dict, d: Dict, e: list[List], f: Literal[[1]]) -> str:  # type: ignore # noqa: UP006
        """Look."""
        return ""

    anything, objects = {"type": "array"}, {"type": "object"}
    expected = [anything, anything, objects, objects, {"type": "array", "items": anything}, {**anything, "enum": [[1]]}]
    assert list(schema_of(look)["function"]["parameters"]["properties"].values()) == expected


def no_docstring(x: int) -> str:
    return ""


def no_hint(x) -> str:  # type: ignore[no-untyped-def]
    """Do."""
    return ""


def bad_hint(x: "Nothing") -> str:  # type: ignore[name-defined]  # noqa: F821
    """Do."""
    return ""


def odd_hint(x: bytes) -> str:
    """Do."""
    return ""


def any_names(**names: int) -> str:
    """Do."""
    return ""


def other_names(x: int) -> str:
    """Do.

    Args:
        y: a number.
    """
    return ""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_docstring, "no_docstring has no docstring"),
        (no_hint, "parameter x of no_hint has no type hint"),
        (bad_hint, "the type hints of bad_hint cannot be read: NameError"),
        (odd_hint, "parameter x of odd_hint: <class 'bytes'> is no type that a model can write"),
        (any_names, "any_names takes \\*\\*names"),
        (other_names, "describes y, which other_names does not take"),
    ],
)
def test_what_is_no_tool_is_a_sentence(function: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        schema_of(function)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"query": "x"}, None),
        ({"query": "x", "limit": 3.0, "exact": True, "kinds": ["a"]}, None),
        ({"query": "x", "kinds": None}, None),
        ({}, "the argument query of search is missing"),
        ({"query": "x", "page": 2}, "search has no argument the text 'page'; its arguments are: query, limit"),
        ({"query": 3}, "the argument query of search must be a text, but is 3"),
        ({"query": None}, "must be a text, but is None"),
        ({"query": "x", "limit": "3"}, "the argument limit of search must be an integer, but is the text '3'"),
        ({"query": "x", "limit": 2.5}, "must be an integer, but is 2.5"),
        ({"query": "x", "limit": True}, "must be an integer, but is True"),
        ({"query": "x", "limit": float("nan")}, "must be an integer, but is nan"),
        ({"query": "x", "exact": "yes"}, "must be true or false, but is the text 'yes'"),
        ({"query": "x", "kinds": ["a", 3]}, "the argument kinds of search at index 1 must be a text, but is 3"),
        ({"query": ["y" * 1000]}, "must be a text, but is \\['y{70,80}\\.\\.\\.$"),
    ],
)
def test_arguments_are_checked_against_the_schema(arguments: dict[str, Any], words: str | None) -> None:
    told = mistake(schema_of(search), arguments)
    if words is None:
        assert told is None
    else:
        assert told is not None
        with pytest.raises(ValueError, match=words):
            raise ValueError(told)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"way": "left"}, "must be one of 'up', 'down', but is the text 'left'"),
        ({"by": "x"}, "must be an integer or a number, but is the text 'x'"),
        ({"by_name": {"a": "b"}}, "the argument by_name of move at the text 'a' must be an integer"),
    ],
)
def test_literals_unions_and_objects_are_checked(change: dict[str, Any], words: str | None) -> None:
    told = mistake(schema_of(move), {"way": "up", "by": 2.5, "by_name": {"a": 1}, "anything": [None], **change})
    assert told is words or (words is not None and words in str(told))


def test_deep_arguments_are_refused() -> None:
    """A schema of another origin may refer to objects in objects."""
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    schema: dict[str, Any] = {"type": "array"}
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    made = {"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    assert "nested too deeply" in str(mistake(made, {"x": deep}))


def test_schemas_of_servers_may_be_true_or_refer_to_others() -> None:
    properties = {
        "a": True,
        "b": {"$ref": "#/$defs/b"},
        "c": {"anyOf": [False, {"type": "null"}]},
        "d": {"items": True},
    }
    made = {"function": {"name": "f", "parameters": {"properties": properties}}}
    assert mistake(made, {"a": 1, "b": "x", "c": None, "d": [5]}) is None
    assert set(example(made)) == {"a", "b", "c", "d"}


LARGE = [10**309, -(10**309), 10**5000, [10**309], {"a": [10**400]}]


@pytest.mark.parametrize("value", LARGE, ids=["309", "-309", "5000", "list", "object"])
def test_integers_that_no_float_holds_are_mistakes(value: Any) -> None:
    for schema in ({}, {"type": "integer"}, {"type": "number"}, {"type": "array"}, {"anyOf": [{"type": "integer"}]}):
        told = mistake({"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}, {"x": value})
        assert told is not None and "the argument x of f" in told and len(told) < 300
    fits = {"function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}
    assert mistake(fits, {"x": 10**300}) is None


def test_a_number_is_in_an_enum_however_it_is_written() -> None:
    def of(values: list[Any], value: Any) -> str | None:
        parameters = {"type": "object", "properties": {"x": {"enum": values}}}
        return mistake({"type": "function", "function": {"name": "f", "parameters": parameters}}, {"x": value})

    assert of([0.5, 1], 1.0) is None
    assert of([0.5, 1.0], 1) is None
    assert of([[1]], [1]) is None
    assert "must be one of 0, 1, but is True" in str(of([0, 1], True))
    assert "must be one of True, but is 1.0" in str(of([True], 1.0))


def test_a_large_integer_is_not_written_once_for_each_form() -> None:
    forms = [{"type": "string"}] * 100_000
    parameters = {"type": "object", "properties": {"x": {"anyOf": forms}}}
    with bounded():
        found = mistake({"type": "function", "function": {"name": "f", "parameters": parameters}}, {"x": 10**4200})
    assert str(found).endswith("must have numbers of at most 308 digits")


def test_whole_numbers_come_as_integers() -> None:
    schema = schema_of(search)["function"]["parameters"]
    made = whole(schema, {"query": "x", "limit": 3.0, "kinds": ["a"]})
    assert made == {"query": "x", "limit": 3, "kinds": ["a"]} and type(made["limit"]) is int
    inner = {"type": "array", "items": {"properties": {"n": {"type": "integer"}, "m": {"type": "number"}}}}
    made = whole({"properties": {"x": inner}}, {"x": [{"n": 1e300, "m": 2.0, "o": 2.0}], "y": 1.0})
    assert [type(value) for value in made["x"][0].values()] == [int, float, float] and type(made["y"]) is float


@settings(max_examples=300, deadline=None)
@given(properties=st.dictionaries(st.sampled_from(NAMES), SCHEMAS, max_size=3), others=SCHEMAS, data=st.data())
def test_no_arguments_raise(properties: dict[str, Any], others: Any, data: st.DataObject) -> None:
    parameters = {"type": "object", "properties": properties, "additionalProperties": others}
    arguments = data.draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))
    told = mistake({"function": {"name": "f", "parameters": parameters}}, arguments)
    assert told is None or len(told) < 20_000
    if told is None:
        # What a tool gets can go to its process, and no float is too small for it.
        whole(parameters, arguments)
        assert not any(isinstance(value, int) and abs(value) > 10**309 for value in arguments.values())
