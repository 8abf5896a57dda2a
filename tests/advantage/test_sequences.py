import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.advantage.sequences import cumulative, discounted, trained_offsets

OFFSETS = np.array([0, 3, 3, 5])


def test_by_hand():
    x = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    assert discounted(x, OFFSETS, 1.0).tolist() == [7, 6, 4, 24, 16]
    assert discounted(x, OFFSETS, 0.5).tolist() == [3, 4, 4, 16, 16]
    assert discounted(x, OFFSETS, 0.0).tolist() == x.tolist()
    assert cumulative(x, OFFSETS).tolist() == [1, 3, 7, 8, 24]
    assert trained_offsets(np.array([True, False, True, False, True]), OFFSETS).tolist() == [0, 2, 2, 3]


@settings(max_examples=100)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=5), max_size=6), st.floats(0, 1))
def test_like_a_loop_over_each_row(rows, factor):
    x = np.array([value for row in rows for value in row])
    offsets = np.cumsum([0, *map(len, rows)])
    backward, forward = [], []
    for row in rows:
        sums, carry = [], 0.0
        for value in reversed(row):
            carry = value + factor * carry
            sums.append(carry)
        backward += sums[::-1]
        carry = 0.0
        for value in row:
            carry = value + carry
            forward.append(carry)
    assert discounted(x, offsets, factor).tolist() == backward
    assert cumulative(x, offsets).tolist() == forward


def test_a_row_is_as_exact_as_alone():
    # As a sum over the whole array less the sum before the row, 1e-9 would vanish behind 1e9.
    assert discounted(np.array([1e9, 1e-9]), np.array([0, 1, 2]), 1.0).tolist() == [1e9, 1e-9]
    assert cumulative(np.array([1e9, 1e-9]), np.array([0, 1, 2])).tolist() == [1e9, 1e-9]


@pytest.mark.timeout(20)
def test_a_million_tokens():
    x = np.ones(1_000_000)
    got = discounted(x, np.arange(0, 1_000_001, 1000), 1.0)
    assert got[::1000].tolist() == [1000.0] * 1000
