"""pass@k and maj@k of one prompt: exact expectations over all draws of k of its n responses without replacement.

- `best_at_k`: the expected largest score. For scores of 0 and 1 it is the unbiased pass@k of Chen et al. 2021
  (arXiv:2107.03374, equation 1), 1 - C(n - c, k) / C(n, k) with c right responses.
- `maj_at_n`: the score of the most frequent of all n answers (self-consistency, Wang et al. 2022, arXiv:2203.11171).
- `maj_at_every_k`: the expectation of `maj_at_n` over k draws, for k = 1 to n. With c_a responses of answer a, whose
  mean score is s_a,

      maj@k = sum over m, t of  E[sum of s_a over the answers with m votes; t answers have m votes, none has more] / t

  The expectation is counted by a polynomial in x (responses drawn) for each t. An answer contributes `C(c_a, j) x^j`
  for j < m votes, and for j = m it is one more tied winner. Answers with fewer than m responses cannot win; together
  they contribute `(1 + x)^c`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

MAX_RESPONSES = 1000
"""Maximum n for `maj_at_every_k`: above it, numbers of draws exceed the range of float64."""


def best_at_k(scores: list[float], k: int) -> float:
    """Compute pass@k: the exact expectation of the largest of k scores drawn from `scores` without replacement.

    With s_1 <= ... <= s_n: sum over i of s_i * C(i - 1, k - 1) / C(n, k). The factor is the fraction of the subsets
    whose largest score is s_i. A k above n counts as n.
    """
    n = len(scores)
    k = min(k, n)
    subsets = math.comb(n, k)
    return math.fsum(s * (math.comb(i, k - 1) / subsets) for i, s in enumerate(sorted(scores)))


def maj_at_n(scores: list[float], answers: Sequence[Hashable]) -> float:
    """Compute the mean score of the responses that gave the most frequent answer.

    If several answers are equally frequent, the result is the mean over them: the expectation of a fair draw.
    """
    votes = Counter(answers)
    most = max(votes.values())
    by_answer: dict[Hashable, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        by_answer[answer].append(score)
    winners = [math.fsum(by_answer[answer]) / most for answer, count in votes.items() if count == most]
    return math.fsum(winners) / len(winners)


def maj_at_every_k(scores: Sequence[float], answers: Sequence[Hashable]) -> np.ndarray:
    """Compute maj@1 to maj@n of one prompt with n responses, [n] float64.

    Args:
        scores: score of each response.
        answers: answer of each response; equal ones are votes for the same answer.

    Raises:
        ValueError: `scores` is empty, or longer than `MAX_RESPONSES`.
    """
    n = len(scores)
    if not 1 <= n <= MAX_RESPONSES:
        raise ValueError(f"maj@k got n={n} responses per prompt; it takes 1 to {MAX_RESPONSES}")
    votes = Counter(answers)
    total: dict[Hashable, float] = defaultdict(float)
    for score, answer in zip(scores, answers, strict=True):
        total[answer] += score
    classes = [(count, total[answer] / count) for answer, count in votes.items()]
    expected = np.zeros(n + 1)
    for winning_votes in range(1, max(votes.values()) + 1):
        expected += _won_with(winning_votes, classes, n)
    return (expected / _binomials(n, n))[1:]


def _won_with(votes: int, classes: Sequence[tuple[int, float]], n: int) -> np.ndarray:
    """Return [n + 1]: entry j sums the winners' mean score over all draws of j responses that are won with `votes`
    votes.

    Args:
        votes: number of votes of the winning answers.
        classes: (number of responses, mean score) of each answer.
        n: number of responses.
    """
    able = [(count, score) for count, score in classes if count >= votes]
    small = sum(count for count, _ in classes if count < votes)
    # Both are [tied winners, further responses drawn]: numbers of draws, and sums of the winners' scores over them.
    further = min(n - votes, small + (len(able) - 1) * (votes - 1))
    ways = np.zeros((len(able) + 1, further + 1))
    scores = np.zeros_like(ways)
    ways[0] = _binomials(small, further)
    for number, (count, score) in enumerate(able, start=1):
        fewer = _binomials(count, votes - 1)
        exactly = float(math.comb(count, votes))
        ways_before = ways[:number].copy()
        scores_before = scores[:number].copy()
        ways[:number] = _times(ways_before, fewer)
        scores[:number] = _times(scores_before, fewer)
        ways[1 : number + 1] += exactly * ways_before
        scores[1 : number + 1] += exactly * (scores_before + score * ways_before)
    won = np.zeros(n + 1)
    for winners in range(1, len(able) + 1):
        drawn = min(further, n - winners * votes) + 1
        won[winners * votes :][:drawn] += scores[winners, :drawn] / winners
    return won


def _times(rows: np.ndarray, polynomial: np.ndarray) -> np.ndarray:
    """Multiply every row, the coefficients of a polynomial, by `polynomial`; products are cut to the row's length."""
    length = rows.shape[1]
    if len(rows) < len(polynomial):
        return np.stack([np.convolve(row, polynomial)[:length] for row in rows])
    product = np.zeros_like(rows)
    for power, coefficient in enumerate(polynomial[:length]):
        product[:, power:] += coefficient * rows[:, : length - power]
    return product


def _binomials(n: int, up_to: int) -> np.ndarray:
    """Return `C(n, j)` for j from 0 to `up_to`."""
    return np.array([float(math.comb(n, j)) for j in range(up_to + 1)])
