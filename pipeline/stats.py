"""Metrics that can be merged across ranks: `Stat`, and the functions that make, merge and reduce them.

A metric is kept as a `Stat`, the few numbers from which it follows (sum and count for a mean, and so on), until all
ranks are merged. `reduce` then gives exactly the value that one process would have computed from all rows, however the
rows were distributed. A metric without observations (the mean of no rows, the correlation of constants) is left out, so
no metric is NaN.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Stat(NamedTuple):
    """A metric in a form that can be merged with the same metric of other ranks.

    The kinds and their values: `mean` (sum, count), `sum` (sum,), `min` (min,), `max` (max,), `std` and `stderr` (n,
    mean, sum of squared deviations), `corr` (n, mean of x, mean of y, sum of squared deviations of x, of y, sum of
    products of deviations). `stderr` is the standard error of the mean, which needs at least two observations.
    """

    kind: str
    values: tuple[float, ...]


Stats = dict[str, Stat]


def mean(total: float, count: float) -> Stat:
    """Return the mean of `count` observations that sum to `total`."""
    return Stat("mean", (float(total), float(count)))


def deviations(kind: str, x: np.ndarray) -> Stat:
    """Return the `std` or `stderr` of the numbers `x` [N]; N is at least 1."""
    return Stat(kind, (float(len(x)), float(x.mean()), float(((x - x.mean()) ** 2).sum())))


def summary(x: np.ndarray, prefix: str, kinds: Iterable[str] = ("mean", "max", "min")) -> Stats:
    """Return the metrics `prefix/KIND` of the numbers `x` [N], for each of `kinds`; empty if N is 0."""
    if not len(x):
        return {}
    x = np.asarray(x, dtype=np.float64)
    made = {
        "mean": lambda: mean(x.sum(), len(x)),
        "max": lambda: Stat("max", (float(x.max()),)),
        "min": lambda: Stat("min", (float(x.min()),)),
    }
    return {f"{prefix}/{kind}": made[kind]() for kind in kinds}


def merge(parts: Iterable[Stats]) -> Stats:
    """Merge the `Stats` of several ranks, micro-batches or chunks into one; a metric may be missing in some.

    Raises:
        ValueError: two parts disagree on the kind of a metric.
    """
    merged: Stats = {}
    for part in parts:
        for name, stat in part.items():
            if name not in merged:
                merged[name] = stat
                continue
            if merged[name].kind != stat.kind:
                raise ValueError(f"metric {name!r} is a {merged[name].kind} in one part and a {stat.kind} in another")
            merged[name] = Stat(stat.kind, _join(stat.kind, merged[name].values, stat.values))
    return merged


def _join(kind: str, a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    if kind in ("mean", "sum"):
        return tuple(x + y for x, y in zip(a, b, strict=True))
    if kind == "min":
        return (min(a[0], b[0]),)
    if kind == "max":
        return (max(a[0], b[0]),)
    # Moments about the mean (Chan, Golub and LeVeque 1979): plain sums of squares would cancel if the deviation is
    # small compared with the mean, as it is for probabilities near 1.
    n = a[0] + b[0]
    if n == 0:
        return a
    share = a[0] * b[0] / n
    if kind in ("std", "stderr"):
        delta = b[1] - a[1]
        return n, a[1] + delta * b[0] / n, a[2] + b[2] + delta * delta * share
    dx, dy = b[1] - a[1], b[2] - a[2]
    return (
        n,
        a[1] + dx * b[0] / n,
        a[2] + dy * b[0] / n,
        a[3] + b[3] + dx * dx * share,
        a[4] + b[4] + dy * dy * share,
        a[5] + b[5] + dx * dy * share,
    )


def _value(stat: Stat) -> float | None:
    v = stat.values
    if stat.kind == "mean":
        return v[0] / v[1] if v[1] else None
    if stat.kind == "std":
        return math.sqrt(max(v[2], 0.0) / v[0]) if v[0] else None
    if stat.kind == "stderr":
        return math.sqrt(max(v[2], 0.0) / (v[0] - 1) / v[0]) if v[0] > 1 else None
    if stat.kind == "corr":
        # A deviation within rounding of the mean comes from a constant, which has no correlation.
        if any(squares <= v[0] * (1e-12 * centre) ** 2 for centre, squares in ((v[1], v[3]), (v[2], v[4]))):
            return None
        return max(-1.0, min(1.0, v[5] / (math.sqrt(v[3]) * math.sqrt(v[4]))))
    return v[0]


def reduce(parts: Iterable[Stats]) -> dict[str, float]:
    """Merge `parts`, and return the value of each metric by name. Metrics without observations are left out."""
    values = {name: _value(stat) for name, stat in merge(parts).items()}
    return {name: value for name, value in values.items() if value is not None}
