"""The policy gradient itself, without a ratio."""

from torch import Tensor

from pipeline.config.learner import ActorConfig
from pipeline.losses.registry import LossInput, Sums, register_policy_loss
from pipeline.losses.sums import token_sums


@register_policy_loss("gpg", zero_without_advantage=True)
def gpg(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """Group policy gradient (Chu et al. 2025, arXiv 2504.02546): `-A log_probs`.

    What else belongs to the method is its advantage estimator, `algorithm.adv_estimator=gpg`.

    Metrics: `ppo_kl`, which the loss itself does not look at.
    """
    return _policy_gradient(data)


@register_policy_loss("reinforce", zero_without_advantage=True)
def reinforce(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """REINFORCE (Williams 1992): `-A log_probs`.

    Nothing in it accounts for rows that another policy generated. Importance weights of the rollout correction w, which
    multiply each token's loss, do: `-w A log_probs` has the gradient of the current policy's objective, without the
    second ratio that a loss of ratios would bring along.

    Metrics: `ppo_kl`, which the loss itself does not look at.
    """
    return _policy_gradient(data)


def _policy_gradient(data: LossInput) -> tuple[Tensor, Sums]:
    return -data.masked(data.advantages) * data.masked(data.log_probs), token_sums(data)
