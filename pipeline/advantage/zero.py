"""The estimator without rewards, for policies that learn only from a teacher."""

import numpy as np

from pipeline.advantage.registry import Estimate, EstimatorInput
from pipeline.config.algorithm import AlgorithmConfig


def zero(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Estimate A = 0 at each token: only `algorithm.teacher_coef` and `actor.distill_coef` teach."""
    return Estimate(np.zeros(len(data.mask)), np.zeros(len(data.mask)))
