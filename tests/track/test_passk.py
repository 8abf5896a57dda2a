"""pass@k and maj@k against all subsets and closed forms."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.track.passk import MAX_RESPONSES, best_at_k, maj_at_every_k, maj_at_n


@settings(max_examples=60)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=7), st.integers(1, 7))
def test_best_at_k_is_the_mean_over_all_subsets(scores, k):
    subsets = list(itertools.combinations(scores, min(k, len(scores))))
    assert best_at_k(scores, k) == pytest.approx(statistics.fmean(max(s) for s in subsets), abs=1e-12)


def test_best_at_k_of_solved_or_not_is_pass_at_k():
    scores = [1.0] * 3 + [0.0] * 7
    assert best_at_k(scores, 4) == pytest.approx(1 - math.comb(7, 4) / math.comb(10, 4))


def test_maj_by_hand():
    assert maj_at_n([1, 0, 1, 0], ["x", "y", "x", "z"]) == 1.0
    assert maj_at_n([1, 0, 0, 0], ["x", "y", "y", "z"]) == 0.0
    assert maj_at_n([1, 0, 1, 0, 0.5], ["x", "y", "x", "y", "z"]) == 0.5  # a tie of right and wrong
    assert maj_at_n([1.0, 0.5, 0.0], ["x", "x", "y"]) == 0.75  # one answer, scored unequally


RESPONSES = st.lists(st.tuples(st.floats(-2, 2), st.sampled_from("abcd")), min_size=1, max_size=7)


@settings(max_examples=100)
@given(RESPONSES)
def test_the_mean_over_all_subsets(responses: list[tuple[float, str]]) -> None:
    found = maj_at_every_k(*zip(*responses, strict=True))
    assert len(found) == len(responses)
    for k, value in enumerate(found, start=1):
        every = [maj_at_n(*map(list, zip(*part, strict=True))) for part in itertools.combinations(responses, k)]
        assert value == pytest.approx(statistics.fmean(every), abs=1e-12)


@pytest.mark.parametrize("n", [3, MAX_RESPONSES])
def test_one_and_two_votes_are_the_mean(n: int) -> None:
    scores = [i / n for i in range(n)]
    assert maj_at_every_k(scores, [0, *range(n - 1)])[:2] == pytest.approx([np.mean(scores)] * 2)


@pytest.mark.parametrize("n", [3, 40])
def test_two_answers_are_a_hypergeometric_tail(n: int) -> None:
    right = n // 3 + 1
    found = maj_at_every_k([1.0] * right + [0.0] * (n - right), [0] * right + [1] * (n - right))
    for k in (1, 2, n // 2, n):
        draws = [math.comb(right, j) * math.comb(n - right, k - j) for j in range(k + 1)]
        won = sum(draws[j] for j in range(k + 1) if 2 * j > k) + (draws[k // 2] / 2 if k % 2 == 0 else 0)
        assert found[k - 1] == pytest.approx(won / math.comb(n, k), rel=1e-9)


@pytest.mark.parametrize("n", [0, MAX_RESPONSES + 1])
def test_numbers_of_responses_that_have_no_maj_at_every_k(n: int) -> None:
    with pytest.raises(ValueError, match=f"n={n} responses"):
        maj_at_every_k([0.0] * n, [0] * n)
