"""Recursions along rows of different lengths in one flat array; `offsets` [R + 1] as in `EstimatorInput`."""

import numpy as np


def trained_offsets(mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[R + 1] int64, the first index of each row in `x[mask]`, for a mask [N] bool."""
    return np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])[offsets]


def spread(trained: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[N] the numbers of the trained tokens in their places, 0 elsewhere; the inverse of `x[mask]`."""
    tokens = np.zeros(len(mask))
    tokens[mask] = trained
    return tokens


def discounted(values: np.ndarray, offsets: np.ndarray, factor: float | np.ndarray) -> np.ndarray:
    """[N] the sums y_t = x_t + f_t * y_(t + 1) from each token to the end of its row, over values x [N].

    `factor` is f, one number or [N]; the factor at the last token of a row is not read.

    One step of the loop takes one token of every row that is long enough, from the end. So the rounding in a row
    depends on no other row; with differences of cumulative sums over the whole array it would.
    """
    lengths = np.diff(offsets)
    by_length = np.argsort(-lengths, kind="stable")
    ends = offsets[1:][by_length]
    longest = int(lengths.max(initial=0))
    alive = np.searchsorted(-lengths[by_length], -np.arange(longest), side="left")
    factors = np.broadcast_to(factor, len(values))
    sums = np.zeros(len(values))
    carry = np.zeros(len(lengths))
    for step in range(longest):
        tokens = ends[: alive[step]] - 1 - step
        carry = values[tokens] + factors[tokens] * carry[: alive[step]]
        sums[tokens] = carry
    return sums


def cumulative(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[N] the sums from the beginning of each row up to and including each token, over values [N]."""
    return discounted(values[::-1], (len(values) - offsets)[::-1], 1.0)[::-1]
