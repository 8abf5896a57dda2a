import math
import statistics

import pytest

from tests.advantage.ragged_batches import Row, advantages, assert_close, estimate, rows_of


def whitened(rows: list[Row], tokens: list[list[float]]) -> list[list[float]]:
    trained = [x for row, xs in zip(rows, tokens, strict=True) for x, m in zip(xs, row.mask, strict=True) if m]
    mean = statistics.fmean(trained) if trained else 0.0
    scale = math.sqrt(statistics.variance(trained) + 1e-8) if len(trained) > 1 else 1.0
    return [
        [(x - mean) / scale * m for x, m in zip(xs, row.mask, strict=True)]
        for row, xs in zip(rows, tokens, strict=True)
    ]


def test_gae_by_hand():
    # delta: 0.9 * 0.6 - 0.5 = 0.04, 0.9 * 0.7 - 0.6 = 0.03, 1 - 0.7 = 0.3; each A is delta + 0.9 * 0.8 * the next A.
    expected = [0.04 + 0.72 * 0.246, 0.03 + 0.72 * 0.3, 0.3]
    rows = [Row(1.0, values=[0.5, 0.6, 0.7], mask=[1, 1, 1])]
    got, returns = estimate("gae", rows, gamma=0.9, lam=0.8)
    assert_close(returns, [[0.21712 + 0.5, 0.246 + 0.6, 1.0]])
    assert_close(got, whitened(rows, [expected]))
    # Tokens of a tool in between, whatever the critic says about them, and at the end: no step, no discount.
    rows = [Row(1.0, values=[0.5, 9.0, 0.6, math.nan, 0.7, -3.0], mask=[1, 0, 1, 0, 1, 0])]
    got, returns = estimate("gae", rows, gamma=0.9, lam=0.8)
    assert_close(returns, [[0.21712 + 0.5, 0, 0.246 + 0.6, 0, 1.0, 0]])
    a, b, c = whitened([Row(0.0, mask=[1, 1, 1])], [expected])[0]
    assert_close(got, [[a, 0, b, 0, c, 0]])


def test_reinforce_plus_plus_by_hand():
    # Returns 0.25, 0.5, 1 and -2: mean -0.0625.
    rows = [Row(1.0, mask=[1, 1, 0, 1]), Row(-2.0, mask=[1])]
    got, returns = estimate("reinforce_plus_plus", rows, gamma=0.5)
    assert returns == [[0.25, 0.5, 0, 1], [-2]]
    scale = math.sqrt((0.3125**2 + 0.5625**2 + 1.0625**2 + 1.9375**2) / 3 + 1e-8)
    assert_close(got, [[0.3125 / scale, 0.5625 / scale, 0, 1.0625 / scale], [-1.9375 / scale]])


def test_remax_by_hand():
    rows = [Row(1.0, mask=[1, 0, 1], penalties=[0.25, 7.0, 0.5], baseline=0.75), Row(1.0, mask=[1], baseline=1.0)]
    got, returns = estimate("remax", rows)
    assert returns == [[0.25, 0, 0.5], [1]]
    assert got == [[-0.5, 0, -0.25], [0]]
    assert estimate("remax", rows, gamma=0.5) == ([[-0.75, 0, -0.25], [0]], [[0.0, 0, 0.5], [1]])


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_fewer_than_two_tokens_and_equal_ones(name):
    assert advantages(name, [Row(3.0)]) == [[0]]
    assert advantages(name, [Row(3.0, mask=[0, 1]), Row(2.0, mask=[0]), Row(2.0, mask=[])]) == [[0, 0], [0], []]
    assert advantages(name, rows_of([0.1] * 3, lengths=[1, 3, 2])) == [[0], [0, 0, 0], [0, 0]]
