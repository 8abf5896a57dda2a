"""Losses for the few tokens that cost the policy most of its entropy (Cui et al. 2025, arXiv 2505.22617).

The entropy falls with the covariance of log-probs and advantages. A token's share of it is
(A - mean A)(log_prob - mean log_prob), with means over all trained tokens of the mini-batch. Tokens are therefore
chosen once for the whole global mini-batch, by the policy before the step. verl chooses within each micro-batch of each
rank, so its choice depends on how rows are packed.
"""

import numpy as np
import torch
from torch import Tensor

from pipeline.config.learner import ActorConfig
from pipeline.losses.ppo import ppo_clip
from pipeline.losses.registry import MAX_LOG_RATIO, Candidates, LossInput, Sums, token_sums


def covariances(tokens: Candidates) -> np.ndarray:
    """[M] float64, each token's share of the covariance; the order of the tokens does not change it."""
    return _centred(tokens.advantages) * _centred(tokens.log_probs)


def clip_cov_mask(tokens: Candidates, config: ActorConfig) -> np.ndarray:
    """[M] bool: a random `clip_cov_ratio` of the M tokens, at least one, among the tokens that PPO does not clip and
    whose covariance lies between `clip_cov_lb` and `clip_cov_ub`; all of these if they are fewer."""
    options = config.policy_loss
    covariance = covariances(tokens)
    eligible = (covariance > options.clip_cov_lb) & (covariance < options.clip_cov_ub) & ~_clipped(tokens, config)
    index = np.flatnonzero(eligible)
    by_key = index[np.argsort(tokens.keys[index], kind="stable")]
    return _first(by_key, options.clip_cov_ratio, tokens)


def kl_cov_mask(tokens: Candidates, config: ActorConfig) -> np.ndarray:
    """[M] bool: the `kl_cov_ratio` of the M tokens, at least one, with the highest covariance; equal ones by key."""
    order = np.lexsort((tokens.keys, -covariances(tokens)))
    return _first(order, config.policy_loss.kl_cov_ratio, tokens)


def clip_cov(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """Clip-Cov (Cui et al. 2025): `ppo_clip`, and 0 for the tokens of `clip_cov_mask`.

    Metrics:
    `pg_clipfrac`: tokens whose clipped term is the larger one (no gradient);
    `cov_frac`: tokens of the mask (no gradient either);
    `ppo_kl`.
    """
    token_mask = _token_mask(data, "clip_cov")
    per_token, clipped = ppo_clip(data.masked(data.advantages), data.log_ratio.exp(), config)
    per_token = torch.where(token_mask, per_token.new_zeros(()), per_token)
    return per_token, token_sums(data, pg_clipfrac=clipped, cov_frac=token_mask)


def kl_cov(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """KL-Cov (Cui et al. 2025): `-A r`, plus `ppo_kl_coef |log r|` for the tokens of `kl_cov_mask`.

    The penalty's log ratio is not clamped, because the penalty matters most if the policies are far apart.

    Metrics: `cov_frac`, tokens with the penalty; `ppo_kl` (verl shows the mean absolute value here, which cannot be
    compared with other losses).
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
            "whole mini-batch first, and pass on what it chose"
        )
    return data.token_mask


def _centred(values: np.ndarray) -> np.ndarray:
    # Sorted first: a sum in another order rounds differently.
    return values - np.sort(values).mean() if len(values) else values


def _clipped(tokens: Candidates, config: ActorConfig) -> np.ndarray:
    log_ratio = np.clip(tokens.log_probs - tokens.old_log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    _, clipped = ppo_clip(torch.from_numpy(tokens.advantages), torch.from_numpy(np.exp(log_ratio)), config)
    return clipped.numpy()


def _first(index: np.ndarray, ratio: float, tokens: Candidates) -> np.ndarray:
    """[M] bool, true at the first entries of `index`: `ratio` of the M tokens, at least one."""
    flags = np.zeros(len(tokens.keys), dtype=bool)
    flags[index[: max(1, int(ratio * len(flags)))]] = True
    return flags
