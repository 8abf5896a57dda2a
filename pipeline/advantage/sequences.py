"""Recursions along rows of different lengths that lie end to end in one array: no padding, no loop over rows.

`offsets` [R + 1] says where each row begins, as in `EstimatorInput`.
"""

import numpy as np


def trained_offsets(mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[R + 1] int64, where each row begins once only the tokens with a true mask [N] are kept, as in `x[mask]`."""
    return np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])[offsets]


def discounted(values: np.ndarray, offsets: np.ndarray, factor: float) -> np.ndarray:
    """[N] the sums y_t = x_t + factor * y_(t + 1) from each token to the end of its row, over values x [N].

    One step of the loop takes one token of every row that is that long, from the end: rounding in a row depends on that
    row alone, which a sum over the whole array less the sum before the row would not give.
    """
    lengths = np.diff(offsets)
    by_length = np.argsort(-lengths, kind="stable")
    ends = offsets[1:][by_length]
    longest = int(lengths.max(initial=0))
    alive = np.searchsorted(-lengths[by_length], -np.arange(longest), side="left")
    sums = np.zeros(len(values))
    carry = np.zeros(len(lengths))
    for step in range(longest):
        tokens = ends[: alive[step]] - 1 - step
        carry = values[tokens] + factor * carry[: alive[step]]
        sums[tokens] = carry
    return sums


def cumulative(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[N] the sums from the beginning of each row up to and with each token, over values [N]."""
    return discounted(values[::-1], (len(values) - offsets)[::-1], 1.0)[::-1]
