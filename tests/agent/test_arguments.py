"""Arguments of tool calls against their schemas: mistakes, as the model reads them, and bounds of the check."""

import json
from typing import Any
from urllib import request

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from pipeline.agent import arguments
from pipeline.agent.arguments import check_schema, mistake, whole
from pipeline.agent.inside.schema import schema_of
from pipeline.agent.tokens.calls import example
from tests.agent.hostile_values import NAMES, SCHEMAS, VALUES
from tests.agent.inside.test_schema import move, search

EVIL, LONG = "(a+)+$", "a" * 60 + "!"
"""A pattern, and a text on which it takes longer than the universe is old."""
DRAFT = "https://json-schema.org/draft/2020-12/schema"


def tool(parameters: Any = None, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties} if parameters is None else parameters
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"query": "x"}, None),
        ({"query": "x", "limit": 3.0, "exact": True, "kinds": ["a"]}, None),
        ({"query": "x", "kinds": None}, None),
        ({}, "the argument query of search is missing"),
        ({"query": "x", "page": 2}, "search has no argument 'page'; its arguments are: query, limit, exact, kinds"),
        ({"query": 3}, "the argument query of search: 3 is not of type 'string'"),
        ({"query": None}, "the argument query of search: None is not of type 'string'"),
        ({"query": "x", "limit": "3"}, "the argument limit of search: '3' is not of type 'integer'"),
        ({"query": "x", "limit": 2.5}, "the argument limit of search: 2.5 is not of type 'integer'"),
        ({"query": "x", "limit": True}, "the argument limit of search: True is not of type 'integer'"),
        ({"query": "x", "exact": "yes"}, "the argument exact of search: 'yes' is not of type 'boolean'"),
        ({"query": "x", "kinds": ["a", 3]}, "the argument kinds of search, at [1]: 3 is not of type 'string'"),
        ({"query": "x", "kinds": [[]]}, "the argument kinds of search, at [0]: [] is not of type 'string'"),
    ],
)
def test_arguments_are_checked_against_the_schema(given: dict[str, Any], words: str | None) -> None:
    assert mistake(schema_of(search), given) == words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"way": "left"}, "the argument way of move: 'left' is not one of ['up', 'down']"),
        ({"by": "x"}, "the argument by of move: 'x' is not of type 'integer', 'number'"),
        ({"by_name": {"a": "b"}}, "the argument by_name of move, at ['a']: 'b' is not of type 'integer'"),
    ],
)
def test_literals_unions_and_objects_are_checked(change: dict[str, Any], words: str | None) -> None:
    assert (
        mistake(schema_of(move), {"way": "up", "by": 2.5, "by_name": {"a": 1}, "anything": [None], **change}) == words
    )


FORMS = {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "string"}]}


@pytest.mark.parametrize(
    ("schema", "value", "words"),
    [
        (True, 5, None),
        (False, 5, "does not allow 5"),
        ({"minimum": 3}, 2, "2 is less than the minimum of 3"),
        ({"maxLength": 3}, "x" * 1000, "is too long"),
        ({"const": 3}, 4, "3 was expected"),
        ({"required": ["a"]}, {}, "'a' is a required property"),
        ({"properties": {"a": {}}, "additionalProperties": False}, {"b": 1}, "('b' was unexpected)"),
        ({"items": False}, [5], "Expected at most 0 items"),
        (FORMS, "x", None),
        (FORMS, 3, None),
        (FORMS, 2, "2 is less than the minimum of 3"),
        (FORMS, [], "[] fits none of the forms in the schema"),
        ({"oneOf": FORMS["anyOf"]}, [], "[] fits none of the forms in the schema"),
        ({"anyOf": [False, {"type": "null"}]}, None, None),
        ({**FORMS, "nullable": True}, None, None),
        ({"$ref": "#/properties/other"}, "x", "'x' is not of type 'integer'"),
        ({"$ref": "#/properties/other", "nullable": True}, None, None),
    ],
)
def test_keywords(schema: Any, value: Any, words: str | None) -> None:
    found = mistake(tool(x=schema, other={"type": "integer"}), {"x": value})
    assert found is words or (words is not None and words in str(found) and len(str(found)) < 400)


@pytest.mark.parametrize(
    "further",
    [{"$ref": "#/$defs/a"}, {"allOf": [{"$ref": "#/$defs/a"}]}, {"patternProperties": {"^q": {"type": "integer"}}}],
)
def test_arguments_that_the_schema_names_elsewhere(further: dict[str, Any]) -> None:
    made = {"type": "object", "properties": {}, "$defs": {"a": {"properties": {"q": {"type": "integer"}}}}, **further}
    assert mistake(tool(made), {"q": 1}) is None
    if "patternProperties" not in further:
        assert mistake(tool(made), {"q": "x"}) == "the argument q of f: 'x' is not of type 'integer'"
    assert mistake(tool({**made, "additionalProperties": {"type": "string"}}), {"p": "x"}) is None


LEFT: dict[str, tuple[Any, Any]] = {
    "pattern": ({"pattern": EVIL}, LONG),
    "a pattern of names": ({"patternProperties": {EVIL: {}}}, {LONG: 1}),
    "a pattern of further names": ({"patternProperties": {EVIL: {}}, "additionalProperties": False}, {LONG: 1}),
    "a pattern of unevaluated names": ({"patternProperties": {EVIL: {}}, "unevaluatedProperties": False}, {LONG: 1}),
    "a pattern in another draft": ({"$schema": DRAFT, "pattern": EVIL}, LONG),
    "a pattern inside another draft": ({"$schema": DRAFT, "items": {"pattern": EVIL}}, [LONG]),
    "a pattern in a reference": ({"$schema": DRAFT, "$ref": "#/properties/evil"}, LONG),
    "a negated pattern": ({"not": {"pattern": "^b"}}, LONG),
    "a condition of a pattern": ({"if": {"pattern": "^b"}, "then": False}, LONG),
    "forms of patterns": ({"oneOf": [{"pattern": "^a"}, {"pattern": "^b"}]}, LONG),
    "items of which one has a pattern": ({"contains": {"pattern": "^b"}, "maxContains": 1}, [LONG, LONG]),
    "a reference to nothing": ({"$ref": "#/nowhere"}, 5),
    "a reference to a number": ({"$ref": "#/properties/other/minimum"}, 5),
    "a reference to no schema": ({"$ref": "#/x-other"}, 5),
    "an id": ({"$id": "http://[", "$ref": "x"}, 5),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_to_the_tool(what: str) -> None:
    schema, value = LEFT[what]
    made = tool(x=schema, y={"type": "integer"}, other={"minimum": 3}, evil={"$schema": DRAFT, "pattern": EVIL})
    made["function"]["parameters"] |= {"$schema": DRAFT, "x-other": {"minimum": "x", "type": "float"}}
    check_schema(made)
    assert mistake(made, {"x": value}) is None
    # The other arguments are checked all the same.
    assert mistake(made, {"x": value, "y": "z"}) == "the argument y of f: 'z' is not of type 'integer'"


def test_references_are_never_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Any] = []
    monkeypatch.setattr(request, "urlopen", fetched.append)
    made = tool(x={"$ref": "http://127.0.0.1:1/x.json"}, y={"$ref": "file:///etc/passwd"})
    check_schema(made)
    assert mistake(made, {"x": 5, "y": 5}) is None and not fetched


def test_a_check_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these would take hours."""
    monkeypatch.setattr(arguments, "CHECK_S", 0.1)
    doubled: dict[str, Any] = {"d0": {"type": "integer"}}
    for depth in range(1, 60):
        doubled[f"d{depth}"] = {"allOf": [{"$ref": f"#/$defs/d{depth - 1}"}] * 2}
    made = tool({"type": "object", "properties": {"x": {"$ref": "#/$defs/d59"}}, "$defs": doubled})
    words = "the arguments of f: too many parts, which take more than 0.1 s to check"
    assert mistake(made, {"x": 5}) == words
    for form in (False, {"type": "integer"}):
        assert mistake(tool(x={"anyOf": [form] * 200_000}), {"x": ["x"] * 20_000}) == words
    with pytest.raises(ValueError, match="^the tool f has no valid JSON schema: too many parts"):
        check_schema(tool(x={"allOf": [{}] * 200_000}))


def test_a_late_check_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "CHECK_S", -1.0)
    assert mistake(schema_of(search), {"query": "x"}) == (
        "the arguments of search: too many parts, which take more than -1 s to check"
    )


def test_deep_arguments_are_refused() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    tree = {"items": {"$ref": "#/properties/x"}}
    assert mistake(tool(x=tree), {"x": deep}) == "the arguments of f: nested too deeply"
    assert mistake(tool(x={"$ref": "#/properties/x"}), {"x": 5}) == "the arguments of f: nested too deeply"
    # As deep as a parser of calls reads.
    assert mistake(tool(x=tree), json.loads('{"x":' + "[" * 64 + "]" * 64 + "}")) is None


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"properties": {"a": {"type": "none"}}}, "'none' fits none of the forms in the schema"),
        ({"properties": {"a": {"$schema": DRAFT, "minimum": "x"}}}, "'x' is not of type 'number'"),
        ({"properties": []}, "[] is not of type 'object'"),
        ({"properties": {"a": {"enum": "x" * 1000}}}, "is not of type 'array'"),
        (True, "it is not an object"),
        ("x", "'x' is not of type 'object', 'boolean'"),
    ],
)
def test_a_schema_that_is_none_is_refused(parameters: Any, words: str) -> None:
    with pytest.raises(ValueError, match="^the tool f has no valid JSON schema: ") as refused:
        check_schema(tool(parameters))
    assert words in str(refused.value) and len(str(refused.value)) < 400


def test_sentences_are_short() -> None:
    many = tool(**{f"argument_{number}": {} for number in range(10_000)})
    for hostile in ({"y" * 10_000: 1}, {"argument_1": 10**400}):
        found = str(mistake(many, hostile))
        assert found and len(found) < 500
    deep = {"x": {"a": {"b" * 10_000: ["c" * 10_000]}}}
    inner = {"additionalProperties": {"items": {"type": "integer"}}}
    found = str(mistake(tool(x={"properties": {"a": inner}}), deep))
    assert found.startswith("the argument x of f, at ['a']['bbb") and found.endswith("ccc' is not of type 'integer'")
    assert len(found) < 700


def test_schemas_that_are_accepted() -> None:
    for made in (schema_of(search), schema_of(move), tool({}), {"function": {"name": "f"}}):
        check_schema(made)
    assert mistake({"function": {"name": "f"}}, {"x": 1}) == "f has no argument 'x'; its arguments are: none"


def test_an_example_of_a_schema_of_a_server() -> None:
    properties = {
        "a": True,
        "b": {"$ref": "#/$defs/b"},
        "c": {"anyOf": [False, {"type": "null"}]},
        "d": {"items": True},
    }
    assert mistake(tool(properties=properties), {}) is None
    assert mistake(tool(**properties), {"a": 1, "b": "x", "c": None, "d": [5]}) is None
    assert set(example(tool(**properties))) == {"a", "b", "c", "d"}


LARGE = [10**309, -(10**309), 10**5000, [10**309], {"a": [10**400]}, float("inf"), float("nan"), [-float("inf")]]


@pytest.mark.parametrize("value", LARGE, ids=["309", "-309", "5000", "list", "object", "inf", "nan", "-inf in a list"])
def test_numbers_that_no_float_holds_are_mistakes(value: Any) -> None:
    for schema in (
        {},
        {"type": "integer"},
        {"type": "number"},
        {"type": "array"},
        {"anyOf": [{"type": "integer"}] * 100_000},
    ):
        assert mistake(tool(x=schema), {"x": value}) == (
            "the argument x of f must have finite numbers of at most 308 digits"
        )
    assert mistake(tool(x={"type": "integer"}), {"x": 10**300}) is None


def test_a_number_is_in_an_enum_however_it_is_written() -> None:
    assert mistake(tool(x={"enum": [0.5, 1]}), {"x": 1.0}) is None
    assert mistake(tool(x={"enum": [0.5, 1.0]}), {"x": 1}) is None
    assert mistake(tool(x={"enum": [[1]]}), {"x": [1]}) is None
    assert "True is not one of [0, 1]" in str(mistake(tool(x={"enum": [0, 1]}), {"x": True}))
    assert "1.0 is not one of [True]" in str(mistake(tool(x={"enum": [True]}), {"x": 1.0}))


def test_whole_numbers_come_as_integers() -> None:
    schema = schema_of(search)["function"]["parameters"]
    made = whole(schema, {"query": "x", "limit": 3.0, "kinds": ["a"]})
    assert made == {"query": "x", "limit": 3, "kinds": ["a"]} and type(made["limit"]) is int
    inner = {"type": "array", "items": {"properties": {"n": {"type": "integer"}, "m": {"type": "number"}}}}
    made = whole({"properties": {"x": inner}}, {"x": [{"n": 1e300, "m": 2.0, "o": 2.0}], "y": 1.0})
    assert [type(value) for value in made["x"][0].values()] == [int, float, float] and type(made["y"]) is float


@settings(max_examples=300)
@given(properties=st.dictionaries(st.sampled_from(NAMES), SCHEMAS, max_size=3), others=SCHEMAS, data=st.data())
def test_no_arguments_raise(properties: dict[str, Any], others: Any, data: st.DataObject) -> None:
    parameters = {"type": "object", "properties": properties, "additionalProperties": others}
    given = data.draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))
    found = mistake(tool(parameters), given)
    assert found is None or len(found) < 20_000
    if found is None:
        # A tool's arguments can go to its process, and no float is too small for them.
        whole(parameters, given)
        json.dumps(given, allow_nan=False)
        assert not any(isinstance(value, int) and abs(value) > 10**309 for value in given.values())
    elif "nullable" not in repr(parameters) and "finite" not in found and "no argument" not in found:
        assert not Draft202012Validator(parameters).is_valid(given)
