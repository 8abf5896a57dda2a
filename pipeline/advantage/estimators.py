"""All advantage estimators. Importing this module registers the built-in ones."""

# ruff: noqa: F401
from pipeline.advantage import outcome, returns, token_baseline, turns
from pipeline.advantage.registry import NEEDS, Estimate, Estimator, EstimatorInput, get_adv_estimator, register_adv_est
