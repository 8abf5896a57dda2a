"""Metrics that policy losses have in common."""

from torch import Tensor

from pipeline.losses.registry import LossInput, Sums


def token_sums(data: LossInput, **events: Tensor) -> Sums:
    """`ppo_kl` and the share of tokens of each event, as sums over the trained tokens with their count.

    `ppo_kl` is old_log_probs - log_probs, clamped like the ratio: the plain estimate of KL(old || new).

    Args:
        data: the tokens.
        events: metric name to [N] bool, where it happened; what it says behind the mask does not count.
    """
    count = data.keep.sum()
    sums: Sums = {name: ((event & data.keep).sum(), count) for name, event in events.items()}
    sums["ppo_kl"] = (-data.log_ratio.detach().double().sum(), count)
    return sums
