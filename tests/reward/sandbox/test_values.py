"""Plain data that leaves the process of a program."""

import collections
import io
import json
import math
import os
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.reward.sandbox.inside import values

keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
data = st.recursive(
    keys | st.sets(keys) | st.frozensets(keys),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


def through(value: Any) -> Any:
    return values.unpack(json.loads(json.dumps(values.pack(value))))


@settings(max_examples=25)
@given(data)
def test_data_comes_back_as_it_was(value: Any) -> None:
    assert repr(through(value)) == repr(value) or through(value) == value


def test_awkward_values_become_plain_ones() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    point = collections.namedtuple("point", "x y")
    for value, plain in (
        (1j, 1j),
        (complex(1, math.inf), complex(1, math.inf)),
        (-math.inf, -math.inf),
        (10**10000, 10**10000),
        (-0.0, -0.0),
        (point(1, 2), (1, 2)),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        ({"a": numpy.float32(0.5), "b": numpy.arange(3)}, {"a": 0.5, "b": [0, 1, 2]}),
    ):
        assert through(value) == plain and (type(through(value)) is type(plain) or isinstance(plain, dict))
    assert math.isnan(through(float("nan"))) and through(Liar(3)) != 4


def test_what_is_not_plain_is_refused_by_its_type() -> None:
    endless: list[Any] = []
    endless.append(endless)
    cases = ((object(), "object"), ({}.keys(), "dict_keys"), (iter([]), "list_iterator"), (range(3), "range"))
    for value, kind in cases:
        with pytest.raises(values.NotPlain, match=f"of the type {kind}, which"):
            values.pack([value])
    with pytest.raises(values.NotPlain, match="more than 200 deep"):
        values.pack(endless)
    with pytest.raises(values.NotPlain, match="more than 200 deep"):
        values.unpack(json.loads('["l", ' * 201 + "1" + "]" * 201))
    assert through(values.unpack(json.loads('["l", ' * 200 + "1" + "]" * 200)))


def test_results_of_earlier_calls_are_read_where_they_are_known() -> None:
    kept = object()
    assert values.unpack(["l", ["r", 3]], {3: kept}) == [kept]
    for results in (None, {}):
        with pytest.raises((ValueError, KeyError)):
            values.unpack(["r", 3], results)


def test_keys_of_one_hash_are_few() -> None:
    alike = [number * (2**61 - 1) for number in range(1, 1000)]
    for packed in (["s", *map(values.pack, alike)], ["d", *([values.pack(key), 1] for key in alike)]):
        with pytest.raises(ValueError, match="keys with one hash"):
            values.unpack(packed)
    assert values.distinct([1, True, 1.0, -1, -2] * 100) == [1, -1, -2]


@settings(max_examples=25)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_anything_else_is_refused_or_data(packed: Any) -> None:
    try:
        result = values.unpack(packed)
    except (ValueError, TypeError, KeyError, IndexError):
        return
    assert isinstance(result, type(None) | int | str | float | bytes | list | tuple | set | frozenset | dict)


def test_messages_have_an_end() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe:
        values.send(writing, {"a": ["l", 1]})
        assert values.receive(pipe) == {"a": ["l", 1]}
        os.write(writing, b"[1")
        os.close(writing)
        with pytest.raises(EOFError):
            values.receive(pipe)
    with pytest.raises(EOFError):
        values.receive(io.BytesIO(b" " * values.MAX_FRAME + b"1\n"))
