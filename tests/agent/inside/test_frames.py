"""What is read from anyone: within bounds, and as JSON that later code can use."""

import json

import pytest

from pipeline.agent.inside.frames import (
    HEADER,
    MAX_HEARD,
    MAX_LEVELS,
    MAX_VALUES,
    cut,
    decode,
    depth,
    encode,
    heard,
    length_of,
    loads,
)
from tests.agent.hostile_values import LITERALS
from tests.bounds import bounded


@pytest.mark.parametrize("literal", LITERALS, ids=lambda literal: literal[:20])
def test_whatever_is_read_can_be_written(literal: str) -> None:
    """In bounded time it is refused by a ValueError, or it is JSON without half characters, of few levels."""
    with bounded():
        try:
            value = heard(b'{"a": %b}' % literal.encode())
        except ValueError as error:
            assert len(str(error)) < 500
        else:
            assert depth(value) <= MAX_LEVELS
            repr({"a": json.dumps(value, ensure_ascii=False, allow_nan=False).encode()})
            assert decode(encode(value)[HEADER.size :]) == value


def test_more_than_an_engine_reads_is_refused_before_it_is_read() -> None:
    values = b'{"a": [' + b"[]," * MAX_VALUES + b"1]}"
    assert decode(values)
    with pytest.raises(ValueError, match=f"more than {MAX_VALUES:,} values"):
        heard(values)
    with pytest.raises(ValueError, match=f"more than {MAX_HEARD:,}"):
        heard(b'{"a": "' + b"x" * MAX_HEARD + b'"}')
    with pytest.raises(ValueError, match="a frame of 4,194,305 bytes"):
        length_of(HEADER.pack(MAX_HEARD + 1), MAX_HEARD)


@pytest.mark.parametrize("text", ["," * 500_000, '[{"' * 100_000, '\\"' * 300_000, "\\" * 300_000, "\\\\,"])
def test_what_stands_in_texts_is_no_value(text: str) -> None:
    assert heard(json.dumps({"a": text, ",": 1}).encode()) == {"a": text, ",": 1}


def test_half_characters_never_come_in() -> None:
    assert decode(rb'{"a": "x\ud800"}') == {"a": "x?"}
    with pytest.raises(ValueError, match="utf-8"):
        decode(b'{"a": "\xed\xa0\x80"}')
    with pytest.raises(ValueError, match="no JSON"):
        decode('{"a": "\ud800"}'.encode("utf-16", "surrogatepass"))


@pytest.mark.parametrize("text", ["1e999", "-1e999", "NaN", "[Infinity]"])
def test_numbers_are_finite(text: str) -> None:
    with pytest.raises(ValueError, match="is no JSON|more than a number can be"):
        loads(text)


@pytest.mark.parametrize("most", [300, 1000])
def test_a_text_is_cut_in_the_middle(most: int) -> None:
    assert cut("x" * most, most) == "x" * most
    short = cut("begin" + "x" * 5_000_000 + "end", most)
    assert len(short) <= most and short.startswith("begin") and short.endswith("end") and "are left out" in short
