"""Losses of policy and critic."""

# ruff: noqa: F401
from pipeline.catalogue import PolicyLoss, get_policy_loss
from pipeline.losses.aggregate import AGG_MODES, agg_divisor, agg_loss
from pipeline.losses.distill import distill_loss
from pipeline.losses.kl import kl_loss
from pipeline.losses.registry import (
    Candidates,
    LossInput,
    Sums,
    checked,
    register_policy_loss,
)
from pipeline.losses.value import explained_variance, value_loss
