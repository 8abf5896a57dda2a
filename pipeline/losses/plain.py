"""The policy gradient itself, without a ratio."""

from torch import Tensor

from pipeline.config.learner import ActorConfig
from pipeline.losses.registry import LossInput, Sums, token_sums


def gpg(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """Group policy gradient (Chu et al. 2025, arXiv 2504.02546): `-A log_probs`, with `algorithm.adv_estimator=gpg`.

    Metrics: `ppo_kl`, which the loss does not use.
    """
    return reinforce(data, config)


def reinforce(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """REINFORCE (Williams 1992): `-A log_probs`.

    It assumes on-policy rows. With importance weights w of the rollout correction, which multiply each token's loss,
    `-w A log_probs` has the gradient of the current policy's objective on rows of another policy.

    Metrics: `ppo_kl`, which the loss does not use.
    """
    return -data.masked(data.advantages) * data.masked(data.log_probs), token_sums(data)
