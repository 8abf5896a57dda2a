"""The KL to the reference policy in the reward: the penalty of each token, and the KL controller (`algorithm.kl_ctrl`).

    reward of token t = score (on the last token) - coef * KL_t

The coefficient is published with every policy version, so all rows of a version have the same coefficient. After each
iteration the controller computes the coefficient of the next version from the mean KL of the iteration's rows.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.config.algorithm import KLControlConfig
from pipeline.kl_estimate import estimate

MAX_ERROR = 0.2
"""Bound of the relative error, `kl / target - 1`, in one step of the adaptive controller: it is clipped to ±0.2."""

MIN_FACTOR = 0.1
"""Smallest factor by which one step multiplies the coefficient. A coefficient that reached 0 could never rise again."""


def kl_penalty(log_probs: np.ndarray, ref_log_probs: np.ndarray, kind: str) -> np.ndarray:
    """[N] float64, estimate of KL(policy || reference) at each token, in nats (`pipeline/kl_estimate.py`).

    Args:
        log_probs: [N] log-probs with which the tokens were sampled.
        ref_log_probs: [N] log-probs of the same tokens under the reference policy.
        kind: a key of `pipeline.kl_estimate.NAMES` (`algorithm.kl_penalty`).

    Raises ValueError for an unknown kind.
    """
    return estimate(kind, log_probs.astype(np.float64) - ref_log_probs.astype(np.float64), np.expm1)


@dataclass
class FixedKL:
    """A KL controller that keeps the coefficient constant."""

    coef: float

    def update(self, current_kl: float, rows: int) -> None:
        """Leave the coefficient as it is."""


@dataclass
class AdaptiveKL:
    """A proportional controller of the logarithm of the coefficient (Ziegler et al. 2019, section 2.2).

        error = clip(kl / target - 1, -0.2, 0.2)        coef *= max(1 + error * rows / horizon, 0.1)

    `target` is a KL per token; in the paper it is a KL per response. If an iteration has more rows than 4.5 horizons,
    the factor could fall below its bound of 0.1; without the bound (as in verl) and from 5 horizons on, the coefficient
    could become negative, and the penalty a bonus.
    """

    coef: float
    """The KL coefficient, the only state of the controller. Checkpoints save and set it."""
    target: float
    """Target KL per token, above 0."""
    horizon: int
    """Number of rows, above 0, over which the coefficient changes by about the relative error."""

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
    """Build the KL controller that `algorithm.kl_ctrl` describes."""
    if config.type == "fixed":
        return FixedKL(config.kl_coef)
    return AdaptiveKL(config.kl_coef, config.target_kl, config.horizon)
