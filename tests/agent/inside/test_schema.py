"""Schemas of tools, as the model reads them."""

from typing import Any, Dict, List, Literal, Optional, Union  # noqa: UP035

import pytest

from pipeline.agent.inside.schema import schema_of


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
