"""Estimators of the KL between two policies at one token, for the reward (numpy) and the loss (torch).

With d = log p(token) - log q(token) for a token sampled from p (Schulman 2020, "Approximating KL divergence"):

    k1, `kl`            d                    unbiased, any sign
    `abs`               |d|
    k2, `mse`           d^2 / 2              biased; has the gradient of KL(p || q)
    k3, `low_var_kl`    exp(-d) - 1 + d      unbiased, never negative, low variance
"""

from collections.abc import Callable
from typing import Any

NAMES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""Accepted names. The loss also accepts each with a trailing `+` (`pipeline/losses/kl.py`)."""

MAX_LOG_RATIO, MAX_K3 = 20.0, 10.0
"""Limits for k3, so that `exp` stays finite: d is clipped to +-MAX_LOG_RATIO, and the result to +-MAX_K3."""


def estimate(kind: str, difference: Any, expm1: Callable[[Any], Any]) -> Any:
    """Estimate the KL from each difference d by `kind` (a key of `NAMES`); the result has the same shape.

    Args:
        kind: name of the estimate.
        difference: log p - log q of each token, a numpy array or a torch tensor.
        expm1: the library's `exp(x) - 1`.

    Raises ValueError for an unknown kind.
    """
    if kind not in NAMES:
        raise ValueError(f"KL estimate {kind!r} is unknown; it is one of {', '.join(NAMES)}")
    which = NAMES[kind]
    if which == "k1":
        return difference
    if which == "abs":
        return abs(difference)
    if which == "k2":
        return difference * difference / 2
    clamped = difference.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (expm1(-clamped) + clamped).clip(-MAX_K3, MAX_K3)
