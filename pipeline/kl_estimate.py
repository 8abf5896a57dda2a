"""Estimates of the KL between two policies at one token, in one place for the reward (numpy) and the loss (torch).

With d = log p(token) - log q(token) for a token sampled from p (Schulman 2020, "Approximating KL divergence"):

    k1, `kl`            d                    unbiased, any sign
    `abs`               |d|
    k2, `mse`           d^2 / 2              biased, its gradient is that of KL(p || q)
    k3, `low_var_kl`    exp(-d) - 1 + d      unbiased, never negative, little variance
"""

from collections.abc import Callable
from typing import Any

NAMES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""Accepted names; a trailing `+` is for the loss alone (`pipeline/train/losses/kl.py`)."""

MAX_LOG_RATIO, MAX_K3 = 20.0, 10.0
"""k3 clamps d to plus or minus the first, and itself to plus or minus the second, so that `exp` stays finite."""


def estimate(kind: str, difference: Any, expm1: Callable[[Any], Any]) -> Any:
    """The estimate `kind` (a key of `NAMES`) of each difference d; array of the same shape.

    Args:
        kind: which estimate.
        difference: log p - log q of each token, a numpy array or a torch tensor.
        expm1: the array's own `exp(x) - 1`.
    """
    which = NAMES[kind]
    if which == "k1":
        return difference
    if which == "abs":
        return abs(difference)
    if which == "k2":
        return difference * difference / 2
    held = difference.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (expm1(-held) + held).clip(-MAX_K3, MAX_K3)
