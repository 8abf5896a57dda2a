"""All losses of an update: the policy's, its KL to the reference, the critic's. Importing this fills the registry."""

from pipeline.losses import covariance, plain, ppo, sequence, smooth  # noqa: F401 (each registers its losses)
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

__all__ = [
    "AGG_MODES",
    "Candidates",
    "LossInput",
    "PolicyLoss",
    "Sums",
    "agg_divisor",
    "agg_loss",
    "checked",
    "explained_variance",
    "get_policy_loss",
    "kl_loss",
    "register_policy_loss",
    "value_loss",
]
