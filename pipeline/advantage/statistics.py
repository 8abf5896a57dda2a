"""Statistics within groups of rows, and over the trained tokens of a batch.

The deviation of equal numbers from their mean is exactly 0 here. Without care it would not be: the rounded mean may
differ from the numbers, and a division by a standard deviation as small would magnify the difference. Equal numbers are
recognised by maximum = minimum.
"""

import numpy as np

STD_EPS = 1e-6
WHITEN_EPS = 1e-8


def deviations(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[R] value - mean of the row's group; exactly 0 in groups of one row or of equal values.

    Args:
        values: [R] one number per row.
        group: [R] group number of each row, from 0.
    """
    groups = int(group.max(initial=-1)) + 1
    mean = np.bincount(group, weights=values, minlength=groups) / group_sizes(group)
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    return np.where((high > low)[group], values - mean[group], 0.0)


def group_std(differences: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[R] standard deviation (ddof 1) of each row's group; 0 in groups of one row.

    Args:
        differences: [R] result of `deviations`.
        group: [R] group number of each row, from 0.
    """
    variance = np.bincount(group, weights=differences**2) / np.maximum(group_sizes(group) - 1, 1)
    return np.sqrt(variance)[group]


def group_sizes(group: np.ndarray) -> np.ndarray:
    """[G] int64, number of rows in each of the G groups of `group` [R]; 1 instead of 0, since callers divide by it."""
    return np.maximum(np.bincount(group), 1)


def normalised(values: np.ndarray, group: np.ndarray, by_std: bool) -> np.ndarray:
    """[R] (value - mean) / (std + 1e-6) within each group.

    Args:
        values: [R] one number per row.
        group: [R] group number of each row, from 0.
        by_std: whether to divide by the standard deviation; else the result is value - mean.
    """
    differences = deviations(values, group)
    return differences / (group_std(differences, group) + STD_EPS) if by_std else differences


def whiten(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[N] (x - mean) / sqrt(var + 1e-8) of `values` x [N], with mean and var (ddof 1) over tokens with a true mask.

    The result is 0 if the mask [N] is false, and exactly 0 everywhere if the values with a true mask are all equal or
    fewer than two.
    """
    white = np.zeros(len(values))
    trained = values[mask]
    if len(trained) and trained.max() > trained.min():
        white[mask] = (trained - trained.mean()) / np.sqrt(trained.var(ddof=1) + WHITEN_EPS)
    return white
