"""Everything that an estimator of a user's own needs, and the look-up of estimators by name."""

# ruff: noqa: F401
from pipeline.advantage.registry import Estimate, EstimatorInput, register_adv_est
from pipeline.catalogue import NEEDS, Estimator, get_adv_estimator
