"""Plain data through the pipe between a program and its judge."""

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


@settings(deadline=None, max_examples=25)
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


@settings(deadline=None, max_examples=25)
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
