"""Majority voting, exactly: the expected score of the most frequent of k answers, for every k at once.

k of a prompt's n responses are drawn without replacement, and the answer that most of them give is chosen, by a fair
draw where several are equally frequent. Nothing is sampled: with c_a responses of answer a, whose mean score is s_a,

    maj@k = sum over m, t of  E[sum of s_a over the answers with m votes; t answers have m votes, none has more] / t

and the expectation is counted by a polynomial in x (responses drawn) for each t, to which an answer contributes
`C(c_a, j) x^j` for j < m votes, and for j = m one more tied winner. Answers with fewer than m responses cannot win;
together they contribute `(1 + x)^c`. k = n is the plain majority of all responses.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

MOST_RESPONSES = 1000
"""Responses of a prompt beyond which numbers of draws leave the range of float64."""


def majority(scores: Sequence[float], answers: Sequence[Hashable]) -> np.ndarray:
    """maj@1 to maj@n of one prompt, [n] float64, where n is the number of its responses.

    Args:
        scores: score of each response.
        answers: what each response answers; equal ones are votes for the same.

    Raises:
        ValueError: there are no responses, or more than `MOST_RESPONSES`.
    """
    n = len(scores)
    if not 1 <= n <= MOST_RESPONSES:
        raise ValueError(f"a majority of {n} responses was asked for; it takes 1 to {MOST_RESPONSES}")
    votes = Counter(answers)
    total: dict[Hashable, float] = defaultdict(float)
    for score, answer in zip(scores, answers, strict=True):
        total[answer] += score
    classes = [(count, total[answer] / count) for answer, count in votes.items()]
    expected = np.zeros(n + 1)
    for most in range(1, max(votes.values()) + 1):
        expected += _won_with(most, classes, n)
    return (expected / _binomials(n, n))[1:]


def _won_with(most: int, classes: Sequence[tuple[int, float]], n: int) -> np.ndarray:
    """Entry j: sum over the draws of j responses whose winners have `most` votes, of the winners' mean score."""
    able = [(count, score) for count, score in classes if count >= most]
    small = sum(count for count, _ in classes if count < most)
    # [winners, further responses drawn]: numbers of draws, and sums over them of the winners' scores.
    further = min(n - most, small + (len(able) - 1) * (most - 1))
    ways, scores = (np.zeros((len(able) + 1, further + 1)) for _ in range(2))
    ways[0] = _binomials(small, further)
    for number, (count, score) in enumerate(able, start=1):
        fewer, exactly = _binomials(count, most - 1), float(math.comb(count, most))
        had, had_scores = ways[:number].copy(), scores[:number].copy()
        ways[:number], scores[:number] = _times(had, fewer), _times(had_scores, fewer)
        ways[1 : number + 1] += exactly * had
        scores[1 : number + 1] += exactly * (had_scores + score * had)
    won = np.zeros(n + 1)
    for winners in range(1, len(able) + 1):
        drawn = min(further, n - winners * most) + 1
        won[winners * most :][:drawn] += scores[winners, :drawn] / winners
    return won


def _times(rows: np.ndarray, polynomial: np.ndarray) -> np.ndarray:
    """Every row, the coefficients of a polynomial, times `polynomial`, cut to the row's length."""
    length = rows.shape[1]
    if len(rows) < len(polynomial):
        return np.stack([np.convolve(row, polynomial)[:length] for row in rows])
    product = np.zeros_like(rows)
    for power, coefficient in enumerate(polynomial[:length]):
        product[:, power:] += coefficient * rows[:, : length - power]
    return product


def _binomials(of: int, most: int) -> np.ndarray:
    """`C(of, j)` for j from 0 to `most`."""
    return np.array([float(math.comb(of, j)) for j in range(most + 1)])
