"""Majority voting against all subsets and closed forms."""

import itertools
import math
import statistics
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.evaluate.majority import MOST_RESPONSES, majority
from pipeline.track.validation import maj_at_n

RESPONSES = st.lists(st.tuples(st.floats(-2, 2), st.sampled_from("abcd")), min_size=1, max_size=7)


@settings(max_examples=100, deadline=None)
@given(RESPONSES)
def test_the_mean_over_all_subsets(responses: list[tuple[float, str]]) -> None:
    found = majority(*zip(*responses, strict=True))
    assert len(found) == len(responses)
    for k, value in enumerate(found, start=1):
        every = [maj_at_n(*map(list, zip(*part, strict=True))) for part in itertools.combinations(responses, k)]
        assert value == pytest.approx(statistics.fmean(every), abs=1e-12)


def test_one_and_two_votes_are_the_mean() -> None:
    scores, answers = [1.0, 0.0, 0.5, 0.0, 0.25], ["a", "b", "a", "c", "d"]
    assert majority(scores, answers)[:2] == pytest.approx([0.35, 0.35])


@pytest.mark.parametrize("n", [3, 40, MOST_RESPONSES])
def test_two_answers_are_a_hypergeometric_tail(n: int) -> None:
    right = n // 3 + 1
    found = majority([1.0] * right + [0.0] * (n - right), [0] * right + [1] * (n - right))
    for k in (1, 2, n // 2, n):
        draws = [math.comb(right, j) * math.comb(n - right, k - j) for j in range(k + 1)]
        won = sum(draws[j] for j in range(k + 1) if 2 * j > k) + (draws[k // 2] / 2 if k % 2 == 0 else 0)
        assert found[k - 1] == pytest.approx(won / math.comb(n, k), rel=1e-9)


@pytest.mark.parametrize("answers", [range(64), [0] * 32 + list(range(1, 33)), [0] * 64, [i % 4 for i in range(64)]])
def test_sixty_four_responses_take_milliseconds(answers: list[int]) -> None:
    scores = [float(answer == 0) for answer in answers]
    begun = time.process_time()
    found = majority(scores, list(answers))
    assert time.process_time() - begun < 0.5
    assert found[0] == pytest.approx(np.mean(scores)) and np.all((found >= 0) & (found <= 1 + 1e-9))


@pytest.mark.parametrize("n", [0, MOST_RESPONSES + 1])
def test_numbers_of_responses_that_have_no_majority(n: int) -> None:
    with pytest.raises(ValueError, match=f"majority of {n} responses"):
        majority([0.0] * n, [0] * n)
