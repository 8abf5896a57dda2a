"""Losses of policy and critic. Importing this package registers the built-in policy losses."""

# ruff: noqa: F401
from pipeline.losses import covariance, pairs, plain, ppo, sequence, smooth
from pipeline.losses.aggregate import AGG_MODES, agg_divisor, agg_loss
from pipeline.losses.kl import kl_loss
from pipeline.losses.registry import (
    Candidates,
    LossInput,
    PolicyLoss,
    Sums,
    checked,
    get_policy_loss,
    register_policy_loss,
)
from pipeline.losses.value import explained_variance, value_loss
