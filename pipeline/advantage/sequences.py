"""Sums along rows of different lengths that lie in one flat array.

Row i of R has the entries `offsets[i]:offsets[i + 1]`; `offsets` [R + 1] int64 ends with the length of the array.
"""

import numpy as np


def trained_offsets(mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[R + 1] int64, offsets of the rows in `x[mask]`, the entries of an array x [N] with a true mask [N]."""
    return np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])[offsets]


def spread(trained: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[N] the numbers `trained`, in order, at the entries with a true mask, and 0 elsewhere: inverse of `x[mask]`."""
    tokens = np.zeros(len(mask))
    tokens[mask] = trained
    return tokens


def discounted(values: np.ndarray, offsets: np.ndarray, factor: float | np.ndarray) -> np.ndarray:
    """[N] the discounted sums y_t = x_t + f_t * y_(t + 1) from each token to the end of the token's row.

    Step s of the loop adds the token that is s tokens before the end of its row, in all rows that are long enough. So
    the rounding in a row does not depend on other rows, as it would with differences of cumulative sums.

    Args:
        values: [N] x.
        offsets: [R + 1].
        factor: f, one number or [N]; the entry at the last token of a row is not read.
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
    """[N] the sum of `values` [N] from the beginning of the token's row up to and including the token."""
    return discounted(values[::-1], (len(values) - offsets)[::-1], 1.0)[::-1]
