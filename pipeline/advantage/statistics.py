"""Statistics within groups of rows, and over the trained tokens of a batch.

Equal numbers deviate by exactly 0: they are recognised by their range, because their rounded mean may differ from them,
and dividing by an equally small standard deviation would magnify the difference.
"""

import numpy as np

STD_EPS = 1e-6
WHITEN_EPS = 1e-8


def deviations(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[R] each value [R] less the mean of its group [R]; exactly 0 in groups of one or of equal values."""
    groups = int(group.max(initial=-1)) + 1
    mean = np.bincount(group, weights=values, minlength=groups) / group_sizes(group)
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    return np.where((high > low)[group], values - mean[group], 0.0)


def group_std(differences: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[R] standard deviation (ddof 1) of each row's group, from its `deviations` [R]; 0 in groups of one."""
    variance = np.bincount(group, weights=differences**2) / np.maximum(group_sizes(group) - 1, 1)
    return np.sqrt(variance)[group]


def group_sizes(group: np.ndarray) -> np.ndarray:
    """Count the rows of each group: [groups] int64, with 1 for an unused number, so that one can divide by it."""
    return np.maximum(np.bincount(group), 1)


def normalised(values: np.ndarray, group: np.ndarray, by_std: bool) -> np.ndarray:
    """[R] (value - mean) / (std + 1e-6) within each group, or value - mean without `by_std`."""
    differences = deviations(values, group)
    return differences / (group_std(differences, group) + STD_EPS) if by_std else differences


def whiten(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[N] (x - mean) / sqrt(var + 1e-8) over the tokens with a true mask, ddof 1; 0 if the mask is false.

    Exactly 0 everywhere if these tokens are all equal or fewer than two.
    """
    white = np.zeros(len(values))
    trained = values[mask]
    if len(trained) and trained.max() > trained.min():
        white[mask] = (trained - trained.mean()) / np.sqrt(trained.var(ddof=1) + WHITEN_EPS)
    return white
