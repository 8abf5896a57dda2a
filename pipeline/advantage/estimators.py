"""All advantage estimators: the registry's door, and the modules that fill it."""

from pipeline.advantage import outcome, returns, token_baseline  # noqa: F401 (registers their estimators)
from pipeline.advantage.registry import (
    NEEDS,
    Estimate,
    Estimator,
    EstimatorInput,
    get_adv_estimator,
    register_adv_est,
)

__all__ = ["NEEDS", "Estimate", "Estimator", "EstimatorInput", "get_adv_estimator", "register_adv_est"]
