"""Losses that treat the tokens apart which cost the policy its entropy (Cui et al. 2025, arXiv 2505.22617).

The entropy falls with the covariance of log-probs and advantages, and few tokens make up most of it. A token's share is
(A - mean A)(log_prob - mean log_prob), the means over all trained tokens of the mini-batch. Which tokens are chosen is
therefore decided once for the whole global mini-batch, by the policy as it stands before the step; verl decides within
each micro-batch of each rank, so that there the choice, and how many are chosen, depends on how rows are packed.
"""

import numpy as np
import torch
from torch import Tensor

from pipeline.config.learner import ActorConfig
from pipeline.losses.ppo import ppo_clip
from pipeline.losses.registry import MAX_LOG_RATIO, Candidates, LossInput, Sums, register_policy_loss
from pipeline.losses.sums import token_sums


def covariances(tokens: Candidates) -> np.ndarray:
    """[M] float64, each token's share of the covariance; the same numbers in whatever order the tokens come."""
    return _centred(tokens.advantages) * _centred(tokens.log_probs)


def clip_cov_mask(tokens: Candidates, config: ActorConfig) -> np.ndarray:
    """[M] bool: `clip_cov_ratio` of the M tokens, at least one, drawn from those with a covariance between
    `clip_cov_lb` and `clip_cov_ub` that PPO's own clip leaves alone; all of these if they are fewer."""
    options = config.policy_loss
    covariance = covariances(tokens)
    eligible = (covariance > options.clip_cov_lb) & (covariance < options.clip_cov_ub) & ~_clipped(tokens, config)
    index = np.flatnonzero(eligible)
    drawn = index[np.argsort(tokens.keys[index], kind="stable")[: _count(options.clip_cov_ratio, tokens)]]
    return _flags(tokens, drawn)


def kl_cov_mask(tokens: Candidates, config: ActorConfig) -> np.ndarray:
    """[M] bool: the `kl_cov_ratio` of the M tokens, at least one, with the highest covariance; equal ones by key."""
    order = np.lexsort((tokens.keys, -covariances(tokens)))
    return _flags(tokens, order[: _count(config.policy_loss.kl_cov_ratio, tokens)])


@register_policy_loss("clip_cov", token_mask_fn=clip_cov_mask, zero_without_advantage=True)
def clip_cov(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """Clip-Cov (Cui et al. 2025): `ppo_clip`, and 0 for the tokens that `clip_cov_mask` drew.

    Metrics:
    `pg_clipfrac`: tokens whose clipped term is the larger one (no gradient);
    `cov_frac`: tokens drawn (no gradient either);
    `ppo_kl`.
    """
    token_mask = _token_mask(data, "clip_cov")
    per_token, clipped = ppo_clip(data.masked(data.advantages), data.log_ratio.exp(), config)
    per_token = torch.where(token_mask, per_token.new_zeros(()), per_token)
    return per_token, token_sums(data, pg_clipfrac=clipped, cov_frac=token_mask)


@register_policy_loss("kl_cov", token_mask_fn=kl_cov_mask)
def kl_cov(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """KL-Cov (Cui et al. 2025): `-A r`, plus `ppo_kl_coef |log r|` for the tokens of `kl_cov_mask`.

    The penalty's log ratio is not clamped, for it matters most where the policies are far apart.

    Metrics: `cov_frac`, tokens that pay the penalty; `ppo_kl`, the plain mean (verl's is the mean of the absolute
    value here, and comparable with no other loss's).
    """
    token_mask = _token_mask(data, "kl_cov")
    penalty = config.policy_loss.ppo_kl_coef * data.masked(data.log_probs - data.old_log_probs).abs()
    per_token = -data.masked(data.advantages) * data.log_ratio.exp()
    per_token = per_token + torch.where(token_mask, penalty, penalty.new_zeros(()))
    return per_token, token_sums(data, cov_frac=token_mask)


def _token_mask(data: LossInput, name: str) -> Tensor:
    if data.token_mask is None:
        raise ValueError(
            f"policy loss {name!r} was called without `token_mask`; run its `token_mask_fn` over the tokens of the "
            "whole mini-batch first and hand over which of them it chose"
        )
    return data.token_mask


def _centred(values: np.ndarray) -> np.ndarray:
    # Sorted first, because a sum in another order rounds differently, and then so would every covariance.
    return values - np.sort(values).mean() if len(values) else values


def _clipped(tokens: Candidates, config: ActorConfig) -> np.ndarray:
    log_ratio = np.clip(tokens.log_probs - tokens.old_log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = np.exp(log_ratio)
    return -tokens.advantages * ratio.clip(1.0 - config.clip_low, 1.0 + config.clip_high) > -tokens.advantages * ratio


def _count(ratio: float, tokens: Candidates) -> int:
    return max(1, int(ratio * len(tokens.keys)))


def _flags(tokens: Candidates, index: np.ndarray) -> np.ndarray:
    flags = np.zeros(len(tokens.keys), dtype=bool)
    flags[index] = True
    return flags
