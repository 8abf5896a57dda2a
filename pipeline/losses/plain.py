"""The plain policy gradient, without a probability ratio."""

from torch import Tensor

from pipeline.config.learner import ActorConfig
from pipeline.losses.registry import LossInput, Sums, token_sums


def gpg(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """Group policy gradient (Chu et al. 2025, arXiv 2504.02546): `-A log_probs`, with `algorithm.adv_estimator=gpg`.

    Metrics: `ppo_kl`, which is only reported.
    """
    return reinforce(data, config)


def reinforce(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """REINFORCE (Williams 1992): `-A log_probs`.

    The loss is right for on-policy rows. For rows of an older policy the rollout correction multiplies each token's
    loss with an importance weight w, and `-w A log_probs` has the gradient of the current policy's objective.

    Metrics: `ppo_kl`, which is only reported.
    """
    return -data.masked(data.advantages) * data.masked(data.log_probs), token_sums(data)
