"""The KL to the reference policy as a loss."""

import torch
from torch import Tensor

from pipeline.kl_estimate import NAMES, estimate


def kl_loss(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kind: str) -> Tensor:
    """Estimate of KL(policy || reference) at each token, in nats.

    A plain kind is differentiated as it stands, which is not the gradient of the KL: for tokens sampled from the policy
    the gradient of k1 is 0 on average, and that of k3 is the gradient of KL(reference || policy). With a `+` behind it,
    the value is the kind's and the gradient that of k2, (log p - log q) grad log p, which is the gradient of
    KL(policy || reference) on average.

    Args:
        log_probs: [N] under the policy that is trained; carries the gradient.
        ref_log_probs: [N] under the reference policy.
        mask: [N] 1 where the token counts (any dtype); what stands elsewhere is not looked at.
        kind: a key of `pipeline.kl_estimate.NAMES`, or one with a `+` behind it.

    Returns:
        [N], 0 where masked.

    Raises:
        ValueError: unknown kind.
    """
    base = kind.removesuffix("+")
    if base not in NAMES:
        raise ValueError(
            f"actor.kl_loss_type {kind!r} is unknown; it is one of {', '.join(NAMES)}, each also with a '+' behind it "
            "(the same value with the gradient of k2)"
        )
    difference = torch.where(mask > 0, log_probs - ref_log_probs, log_probs.new_zeros(()))
    value = estimate(base, difference, torch.expm1)
    if base == kind:
        return value
    k2 = estimate("k2", difference, torch.expm1)
    return value.detach() + (k2 - k2.detach())
