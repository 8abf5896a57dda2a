"""The KL to the reference policy as a term of the policy's loss."""

import torch
from torch import Tensor

from pipeline.kl_estimate import NAMES, estimate


def kl_loss(
    log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kind: str, log_ratio: Tensor | None = None
) -> Tensor:
    """[N] estimate of KL(policy || reference) at each token, in nats; 0 for masked tokens.

    With a trailing `+` the value is the estimate of `kind`, but the gradient is the gradient of k2,
    (log p - log q) grad log p, which is on average the gradient of KL(policy || reference). Without it, the gradient
    differs from the KL's: for tokens sampled from the policy, the gradient of k1 is 0 on average, and k3 has the
    gradient of KL(reference || policy).

    With `log_ratio` each token counts by its probability ratio p / p_old. For tokens sampled from the old policy, k1
    and k3 then have on average the value and the gradient of KL(policy || reference), since their gradient flows
    through the ratio, too (DeepSeek-AI 2025, arXiv 2512.02556). Other kinds get the ratio as a weight.

    Args:
        log_probs: [N] under the policy that is trained, with gradient.
        ref_log_probs: [N] under the reference policy.
        mask: [N] 1 if the token counts (any dtype); masked values are not read.
        log_ratio: [N] log of the probability ratio of policy and old policy; None to count all tokens alike.
        kind: a key of `pipeline.kl_estimate.NAMES`, with or without a trailing `+`.

    Raises ValueError for an unknown kind.
    """
    base = kind.removesuffix("+")
    difference = torch.where(mask > 0, log_probs - ref_log_probs, log_probs.new_zeros(()))
    value = estimate(base, difference, torch.expm1)
    if base != kind:
        k2 = estimate("k2", difference, torch.expm1)
        value = value.detach() + (k2 - k2.detach())
    if log_ratio is None:
        return value
    ratio = log_ratio.exp()
    return value * (ratio if NAMES[base] in ("k1", "k3") and base == kind else ratio.detach())
