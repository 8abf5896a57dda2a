"""The checksum of a bucket: any wrong number is seen, and devices agree."""

import random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.weights.checksum import BLOCK, COLUMNS, _device_sums, _host_sums, crc

SIZES = (0, 1, 7, 8, 8 * COLUMNS, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 8 * COLUMNS + 3)


def random_bytes(size: int) -> bytearray:
    return bytearray(random.Random(size).randbytes(size))


@settings(max_examples=60)
@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_other_byte_changes_the_checksum(data: bytes, draw: Any) -> None:
    place, value = draw.draw(st.integers(0, len(data) - 1)), draw.draw(st.integers(1, 255))
    other = bytearray(data)
    other[place] ^= value
    assert crc(data) == crc(torch.frombuffer(bytearray(data), dtype=torch.uint8)) != crc(other)
    assert crc(data) != crc(data + b"\0"), "zeros at the end count"


def test_bytes_that_change_places_change_the_checksum() -> None:
    data = random_bytes(3 * BLOCK + 100)
    value, row = crc(data), 8 * COLUMNS
    # Numbers in one row, in one column, rows, blocks.
    for first, second, size in (
        (8, 16, 8),
        (8, 8 + row, 8),
        (row, 3 * row, row),
        (0, BLOCK, BLOCK),
        (0, 3 * BLOCK, 64),
    ):
        other = bytearray(data)
        other[first : first + size], other[second : second + size] = (
            data[second : second + size],
            data[first : first + size],
        )
        assert crc(other) != value
    # Errors that cancel out in a row, in a column, and along a diagonal.
    for step in (8, row, row + 8):
        other = bytearray(data)
        other[:8], other[step : step + 8] = b"\1" + bytes(7), b"\2" + bytes(7)
        turned = bytearray(other)
        turned[0], turned[step] = 2, 1
        assert crc(other) != crc(turned)


def test_devices_agree_wherever_the_bytes_begin() -> None:
    for size in SIZES:
        data = torch.frombuffer(random_bytes(size + 16), dtype=torch.uint8)
        for start in (0, 2, 8):
            part = data[start : start + size]
            device, host = (
                b"".join(x.tobytes() for x in sums) for sums in (_device_sums(part), _host_sums(part.numpy()))
            )
            assert device == host, (size, start)
