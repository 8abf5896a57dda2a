"""The distillation loss: the divergence of teacher and policy over the teacher's most likely tokens.

The outcomes at a token are the teacher's K most likely tokens and, as one more, all other tokens together. With teacher
p, policy q and their mixture m = beta p + (1 - beta) q over these outcomes, the loss is (Agarwal et al. 2024, arXiv
2306.13649, in the order of TRL 1.16):

    beta = 0        KL(p || q)
    beta = 1        KL(q || p)
    else            beta KL(p || m) + (1 - beta) KL(q || m)

A merged outcome can only lower a divergence, so this is a lower bound of the divergence over the whole vocabulary.
"""

import math

import torch
from torch import Tensor

MOST_LISTED = -1e-7
"""Largest log of the probability of the listed tokens; above it the other tokens count as this unlikely."""


def with_rest(listed: Tensor) -> Tensor:
    """[N, K + 1] log-probs of the outcomes, from the log-probs `listed` [N, K] of the listed tokens."""
    together = listed.logsumexp(-1, keepdim=True).clamp(max=MOST_LISTED)
    return torch.cat([listed, torch.log(-torch.expm1(together))], -1)


def distill_loss(policy: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """[N] the divergence at each token, in nats.

    Args:
        policy: [N, K] the policy's log-probs of the teacher's most likely tokens, with gradient.
        teacher: [N, K] the teacher's log-probs of them.
        beta: `actor.distill_beta`.
    """
    q, p = with_rest(policy), with_rest(teacher)
    if beta == 0:
        return _kl(p, q)
    if beta == 1:
        return _kl(q, p)
    mixture = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    return beta * _kl(p, mixture) + (1 - beta) * _kl(q, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """[N] KL(p || q) from log-probs [N, K + 1]."""
    return (p.exp() * (p - q)).sum(-1)
