"""The KL to the reference policy in the reward: the penalty of each token, and who steers its coefficient.

    reward of token t = score (on the last token) - coef * KL_t

The coefficient is published with every policy version and looked up by the advantage stage, so that all rows of a
version are penalised alike, whenever they are scored. After an iteration the controller sees the mean KL of its rows
and gives the coefficient of the next version.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.config.algorithm import KLControlConfig
from pipeline.kl_estimate import NAMES, estimate

MAX_ERROR = 0.2
"""Largest relative distance from the target that a step of the adaptive controller answers to."""

MIN_FACTOR = 0.1
"""The coefficient keeps at least this share in one step: at 0 or below, no later step could bring it back."""


def kl_penalty(log_probs: np.ndarray, ref_log_probs: np.ndarray, kind: str) -> np.ndarray:
    """[N] float64, estimate of KL(policy || reference) at each token, in nats (`pipeline/kl_estimate.py`).

    Args:
        log_probs: [N] log-probs that the tokens were sampled with.
        ref_log_probs: [N] log-probs of the same tokens under the reference policy.
        kind: a key of `pipeline.kl_estimate.NAMES` (`algorithm.kl_penalty`).

    Raises:
        ValueError: unknown kind.
    """
    check_kind(kind)
    return estimate(kind, log_probs.astype(np.float64) - ref_log_probs.astype(np.float64), np.expm1)


def check_kind(kind: str) -> None:
    """Refuse an `algorithm.kl_penalty` that is no estimate.

    Raises:
        ValueError: unknown kind.
    """
    if kind not in NAMES:
        plus = "; a trailing '+' chooses a gradient, which a reward has not" if kind.endswith("+") else ""
        raise ValueError(f"algorithm.kl_penalty {kind!r} is unknown; it is one of {', '.join(NAMES)}{plus}")


@dataclass
class FixedKL:
    """The coefficient stays as it is."""

    coef: float

    def update(self, current_kl: float, rows: int) -> None:
        """Nothing to steer."""


@dataclass
class AdaptiveKL:
    """A proportional controller of the logarithm of the coefficient (Ziegler et al. 2019, section 2.2).

        error = clip(kl / target - 1, -0.2, 0.2)        coef *= 1 + error * rows / horizon

    `target` is a KL per token, where the paper's is one per response. One step never takes more than nine tenths of the
    coefficient: with more than five horizons of rows the formula (and verl) would turn the penalty into a bonus.
    """

    coef: float
    """The only state; settable, for checkpoints."""
    target: float
    """Above 0."""
    horizon: int
    """Above 0, in rows."""

    def update(self, current_kl: float, rows: int) -> None:
        """One step.

        Args:
            current_kl: mean KL per token of an iteration's rows.
            rows: how many rows the iteration has.
        """
        error = min(max(current_kl / self.target - 1.0, -MAX_ERROR), MAX_ERROR)
        self.coef *= max(1.0 + error * rows / self.horizon, MIN_FACTOR)


KLController = FixedKL | AdaptiveKL


def kl_controller(config: KLControlConfig) -> KLController:
    """The controller of `algorithm.kl_ctrl`.

    Raises:
        ValueError: unknown type, a negative coefficient, or a target or horizon that is not above 0.
    """
    if config.type not in ("fixed", "adaptive"):
        raise ValueError(f"algorithm.kl_ctrl.type {config.type!r} is unknown; it is 'fixed' or 'adaptive'")
    if config.kl_coef < 0:
        raise ValueError(
            f"algorithm.kl_ctrl.kl_coef is {config.kl_coef}, which would reward distance from the reference policy; "
            "it must be at least 0"
        )
    if config.type == "fixed":
        return FixedKL(config.kl_coef)
    for name in ("target_kl", "horizon"):
        if not getattr(config, name) > 0:
            raise ValueError(f"algorithm.kl_ctrl.{name} is {getattr(config, name)}; it must be above 0")
    return AdaptiveKL(config.kl_coef, config.target_kl, config.horizon)
