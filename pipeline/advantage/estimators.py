"""Names to import in a file with an advantage estimator of your own, and the look-up of estimators by name."""

# ruff: noqa: F401
from pipeline.advantage.registry import Estimate, EstimatorInput, register_adv_est
from pipeline.catalogue import NEEDS, Estimator, get_adv_estimator
