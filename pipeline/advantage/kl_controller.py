"""The KL to the reference policy in the reward: the penalty of each token, and the KL controller (`algorithm.kl_ctrl`).

    reward of token t = score (on the last token) - coef * KL_t

The coefficient is published with every policy version, so that all rows of a version have the same one. After an
iteration the controller takes the mean KL of its rows and gives the coefficient of the next version.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.config.algorithm import KLControlConfig
from pipeline.kl_estimate import estimate

MAX_ERROR = 0.2
"""Clip of the relative error in one step of the adaptive controller."""

MIN_FACTOR = 0.1
"""Smallest factor of one step: no later step could raise a coefficient of 0 or below."""


def kl_penalty(log_probs: np.ndarray, ref_log_probs: np.ndarray, kind: str) -> np.ndarray:
    """[N] float64, estimate of KL(policy || reference) at each token, in nats (`pipeline/kl_estimate.py`).

    Args:
        log_probs: [N] log-probs that the tokens were sampled with.
        ref_log_probs: [N] log-probs of the same tokens under the reference policy.
        kind: a key of `pipeline.kl_estimate.NAMES` (`algorithm.kl_penalty`).

    Raises ValueError for an unknown kind.
    """
    return estimate(kind, log_probs.astype(np.float64) - ref_log_probs.astype(np.float64), np.expm1)


@dataclass
class FixedKL:
    """A constant coefficient."""

    coef: float

    def update(self, current_kl: float, rows: int) -> None:
        """Leave the coefficient as it is."""


@dataclass
class AdaptiveKL:
    """A proportional controller of the logarithm of the coefficient (Ziegler et al. 2019, section 2.2).

        error = clip(kl / target - 1, -0.2, 0.2)        coef *= max(1 + error * rows / horizon, 0.1)

    `target` is a KL per token; the paper's is one per response. The lower bound of 0.1 matters from five horizons of
    rows on: without it (as in verl) the penalty would become a bonus.
    """

    coef: float
    """The only state; settable, for checkpoints."""
    target: float
    """Target KL per token, above 0."""
    horizon: int
    """Horizon in rows, above 0."""

    def update(self, current_kl: float, rows: int) -> None:
        """Adapt the coefficient by one step.

        Args:
            current_kl: mean KL per token of an iteration's rows.
            rows: number of rows of the iteration.
        """
        error = min(max(current_kl / self.target - 1.0, -MAX_ERROR), MAX_ERROR)
        self.coef *= max(1.0 + error * rows / self.horizon, MIN_FACTOR)


KLController = FixedKL | AdaptiveKL


def kl_controller(config: KLControlConfig) -> KLController:
    """Return the controller of `algorithm.kl_ctrl`, whose bounds the config declares."""
    if config.type == "fixed":
        return FixedKL(config.kl_coef)
    return AdaptiveKL(config.kl_coef, config.target_kl, config.horizon)
