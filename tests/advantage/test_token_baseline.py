import math
from dataclasses import replace

import pytest

from tests.advantage.ragged_batches import Row, advantages, assert_close, estimate, rows_of

BOTH = ["optimal_token_baseline", "tir_optimal_token_baseline"]
HALF, FIFTH = math.log(0.5), math.log(0.2)
# With pi 0.5 and squares adding up to 0.5 w is 0.5; with 0.2 and 0.4 it is 1.
SHORT = Row(1.0, 0, [1, 1], log_probs=[HALF, FIFTH], sum_pi_squared=[0.5, 0.4])
LONG = Row(2.0, 0, [1, 1, 1], log_probs=[FIFTH] * 3, sum_pi_squared=[0.4] * 3)


@pytest.mark.parametrize("name", BOTH)
def test_by_hand(name):
    # W: 0.5 and 1.5 in the short one, 1, 2 and 3 in the long one.
    first, second = (0.5 * 1 + 1 * 2) / 1.5, (1.5 * 1 + 2 * 2) / 3.5
    got, returns = estimate(name, [SHORT, LONG])
    assert_close(got, [[1 - first, 1 - second], [2 - first, 2 - second, 2]])
    assert returns == [[1, 1], [2, 2, 2]]
    got = advantages(name, [SHORT, LONG], handle_zero_tail=False)
    assert_close(got, [[1 - first, 1 - second], [2 - first, 2 - second, 0]])


def test_places_with_tools_in_between():
    # At the second place of the plain form the short one's tool speaks: the long one is alone there.
    turns = Row(1.0, 0, [1, 0, 1], log_probs=[HALF, 3.0, FIFTH], sum_pi_squared=[0.5, math.nan, 0.4])
    first, compact = (0.5 + 2) / 1.5, (1.5 + 2 * 2) / 3.5
    third = (1.5 + 3 * 2) / 4.5
    got = advantages("optimal_token_baseline", [turns, LONG])
    assert_close(got, [[1 - first, 0, 1 - third], [2 - first, 2, 2 - third]])
    got = advantages("tir_optimal_token_baseline", [turns, LONG])
    assert_close(got, [[1 - first, 0, 1 - compact], [2 - first, 2 - compact, 2]])


@pytest.mark.parametrize("name", BOTH)
def test_alone_from_the_start(name):
    for rows in ([Row(3.0, 0, [1, 0, 1])], [Row(3.0, 0, [1, 0, 1]), Row(9.0, 0, []), Row(9.0, 0, [0])]):
        assert estimate(name, rows)[0][0] == [3, 0, 3]
        assert estimate(name, rows, handle_zero_tail=False)[0][0] == [0, 0, 0]
        assert estimate(name, rows)[1][0] == [3, 0, 3]


@pytest.mark.parametrize("name", BOTH)
def test_equal_returns_give_exactly_zero(name):
    rows = [replace(row, score=0.1) for row in (SHORT, LONG, SHORT, LONG)]
    assert advantages(name, rows) == [[0, 0], [0, 0, 0]] * 2


@pytest.mark.parametrize("name", BOTH)
def test_a_certain_policy_has_the_plain_mean_and_no_weight_is_negative(name):
    certain = [replace(row, log_probs=[0.0], sum_pi_squared=[1.0]) for row in rows_of([1, 0, 5])]
    assert_close(advantages(name, certain), [[-1], [-2], [3]])
    # pi and its squares from different policies: 1 - 2 * 0.9 + 0.5 is below 0, and counts as 0.
    stale = replace(certain[0], log_probs=[math.log(0.9)], sum_pi_squared=[0.5])
    unsure = replace(certain[1], log_probs=[HALF], sum_pi_squared=[0.5])
    assert_close(advantages(name, [stale, unsure]), [[1], [0]])
    # However small the weights, it is their proportion that counts.
    tiny = [replace(row, sum_pi_squared=[1 + w]) for row, w in zip(certain, (2**-40, 2**-40, 2**-39), strict=True)]
    assert_close(advantages(name, tiny), [[1 - 11 / 4], [-11 / 4], [5 - 11 / 4]])
