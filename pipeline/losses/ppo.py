"""Policy losses that bound the probability ratio r = exp(log_probs - old_log_probs) of each token by itself."""

import torch
from torch import Tensor

from pipeline.config.learner import ActorConfig
from pipeline.losses.registry import LossInput, Sums, token_sums


def ppo_clip(advantages: Tensor, ratio: Tensor, config: ActorConfig) -> tuple[Tensor, Tensor]:
    """Compute `max(-A r, -A clip(r, 1 - low, 1 + high))`, PPO's clipped loss (Schulman et al. 2017, equation 7).

    Two separate bounds, `clip_ratio_low` and `clip_ratio_high`, follow DAPO (Yu et al. 2025, equation 10).

    Args:
        advantages: [N] advantages A.
        ratio: [N] probability ratios r.
        config: has the bounds `clip_low` and `clip_high`.

    Returns:
        losses [N], and [N] bool, true if the clipped term is the larger one, so that the token has no gradient.
    """
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return torch.maximum(plain, clipped), clipped > plain


def vanilla(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """PPO's clipped loss with separate clip bounds and the dual clip (Ye et al. 2020, equation 5).

    The loss is `ppo_clip`; for A < 0 it is at most `-A c`, with c = `clip_ratio_c`. Without this bound one token of a
    bad response whose probability rose a lot could dominate the gradient.

    Metrics:
    `pg_clipfrac`: tokens whose clipped term is the larger one (no gradient);
    `pg_clipfrac_lower`: tokens with A < 0 at the bound of the dual clip (no gradient either);
    `ppo_kl`.
    """
    advantages = data.masked(data.advantages)
    ppo, clipped = ppo_clip(advantages, data.log_ratio.exp(), config)
    bound = -advantages * config.clip_ratio_c
    negative = advantages < 0
    per_token = torch.where(negative, torch.minimum(ppo, bound), ppo)
    return per_token, token_sums(data, pg_clipfrac=clipped, pg_clipfrac_lower=negative & (ppo > bound))


def cispo(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """CISPO: clipped importance weights instead of a clipped objective (MiniMax-M1, 2025, arXiv 2506.13585).

    The loss is `-sg(clip(r, 1 - low, 1 + high)) A log_probs`; sg stops the gradient. Every token keeps a gradient; only
    the token's importance weight is bounded.

    Metrics: `pg_clipfrac`, tokens whose weight is clipped; `ppo_kl`.
    """
    ratio = data.log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    per_token = -weight * data.masked(data.advantages) * data.masked(data.log_probs)
    return per_token, token_sums(data, pg_clipfrac=weight != ratio)


def dppo_tv(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """DPPO with the binary total variation (Qi et al. 2026, arXiv 2602.04879): a trust region in probabilities.

    The loss is `-A sg(min(r, c)) log_probs` while the sampled token's probability p lies within the bound in the
    direction of the update: p - p_old <= high if A > 0, p_old - p <= low otherwise. Beyond the bound the loss is 0. sg
    stops the gradient.

    Here `clip_ratio_low` and `clip_ratio_high` bound differences of probabilities. `clip_ratio_c` is c, at which the
    importance weight is truncated. The default of 3 suits the dual clip of `vanilla`; 20 truncates fewer weights.

    Metrics:
    `pg_clipfrac`: tokens beyond the bound (no gradient);
    `pg_clipfrac_lower`: tokens within the bound whose weight is truncated;
    `ppo_kl`.
    """
    moved = data.masked(data.log_probs.detach()).exp() - data.masked(data.old_log_probs).exp()
    valid = torch.where(data.masked(data.advantages) > 0, moved <= config.clip_high, moved >= -config.clip_low)
    return _dppo(data, valid, config)


def dppo_kl(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """DPPO with the binary KL (Qi et al. 2026, arXiv 2602.04879): as `dppo_tv`, but the trust region bounds a KL.

    The distance is KL(p_old || p) between the two distributions over "this token" and "any other token". It is at most
    `clip_ratio_high` nats if A > 0, else `clip_ratio_low` nats; beyond, the loss is 0. A token that the update moves
    back towards p_old (p <= p_old if A > 0, p >= p_old otherwise) trains at any distance.

    Metrics as in `dppo_tv`.
    """
    new, old = data.masked(data.log_probs.detach()), data.masked(data.old_log_probs)
    distance = _binary_kl(old, new)
    rises = data.masked(data.advantages) > 0
    valid = torch.where(
        rises,
        (distance <= config.clip_high) | (new <= old),
        (distance <= config.clip_low) | (new >= old),
    )
    return _dppo(data, valid, config)


def _binary_kl(old: Tensor, new: Tensor) -> Tensor:
    """[N] KL(old || new) in nats between the distributions (p, 1 - p), p = exp(log-prob); infinite if only the new p is
    1.

    Args:
        old, new: [N] log-probs.
    """
    # expm1 and xlogy are exact for p near 1, and most tokens are near 1.
    rest_old, rest_new = -torch.expm1(old.clamp(max=0.0)), -torch.expm1(new.clamp(max=0.0))
    rest = torch.special.xlogy(rest_old, rest_old) - torch.special.xlogy(rest_old, rest_new)
    return old.exp() * (old - new) + rest


def _dppo(data: LossInput, valid: Tensor, config: ActorConfig) -> tuple[Tensor, Sums]:
    ratio = data.log_ratio.detach().exp()
    weight = torch.where(valid, ratio.clamp(max=config.clip_ratio_c), ratio.new_zeros(()))
    per_token = -weight * data.masked(data.advantages) * data.masked(data.log_probs)
    truncated = valid & (ratio > config.clip_ratio_c)
    return per_token, token_sums(data, pg_clipfrac=~valid, pg_clipfrac_lower=truncated)
