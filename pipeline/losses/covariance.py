"""Clip-Cov and KL-Cov: losses that restrain the few tokens that lower the policy's entropy most (Cui et al. 2025, arXiv
2505.22617).

The higher the covariance of log-probs and advantages, the faster the entropy falls. A token contributes
(A - mean A)(log_prob - mean log_prob) to the covariance, with means over all trained tokens of the mini-batch. Tokens
are therefore chosen once for the whole global mini-batch, with log-probs of the policy before the step. verl chooses
within each micro-batch of each rank, so verl's choice depends on how rows are packed.
"""

import numpy as np
import torch
from torch import Tensor

from pipeline.config.learner import ActorConfig
from pipeline.losses.ppo import ppo_clip
from pipeline.losses.registry import MAX_LOG_RATIO, Candidates, LossInput, Sums, token_sums


def covariances(tokens: Candidates) -> np.ndarray:
    """[M] float64, (A - mean A)(log_prob - mean log_prob) of each token, the same for any order of the tokens."""
    return _centred(tokens.advantages) * _centred(tokens.log_probs)


def clip_cov_mask(tokens: Candidates, config: ActorConfig) -> np.ndarray:
    """[M] bool, true for randomly chosen tokens whose gradient `clip_cov` removes.

    A token may be chosen if PPO does not clip it and its covariance lies between `clip_cov_lb` and `clip_cov_ub`. The
    number of chosen tokens is the fraction `clip_cov_ratio` of M, at least one, or all that may be chosen if they are
    fewer.
    """
    options = config.policy_loss
    covariance = covariances(tokens)
    eligible = (covariance > options.clip_cov_lb) & (covariance < options.clip_cov_ub) & ~_clipped(tokens, config)
    index = np.flatnonzero(eligible)
    by_key = index[np.argsort(tokens.keys[index], kind="stable")]
    return _first(by_key, options.clip_cov_ratio, tokens)


def kl_cov_mask(tokens: Candidates, config: ActorConfig) -> np.ndarray:
    """[M] bool, true for the tokens with the highest covariance: the fraction `kl_cov_ratio` of M, at least one.

    Among tokens of equal covariance, the lower `keys` come first.
    """
    order = np.lexsort((tokens.keys, -covariances(tokens)))
    return _first(order, config.policy_loss.kl_cov_ratio, tokens)


def clip_cov(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """Clip-Cov (Cui et al. 2025): the loss `ppo_clip`, but 0 for the tokens that `clip_cov_mask` chose.

    Metrics:
    `pg_clipfrac`: tokens whose clipped term is the larger one (no gradient);
    `cov_frac`: tokens that `clip_cov_mask` chose (no gradient either);
    `ppo_kl`.
    """
    token_mask = _token_mask(data, "clip_cov")
    per_token, clipped = ppo_clip(data.masked(data.advantages), data.log_ratio.exp(), config)
    per_token = torch.where(token_mask, per_token.new_zeros(()), per_token)
    return per_token, token_sums(data, pg_clipfrac=clipped, cov_frac=token_mask)


def kl_cov(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """KL-Cov (Cui et al. 2025): `-A r`, plus the penalty `ppo_kl_coef |log r|` for the tokens that `kl_cov_mask` chose.

    The penalty's log ratio is not clamped, because the penalty matters most if the policies are far apart.

    Metrics: `cov_frac`, tokens with the penalty; `ppo_kl` (verl reports the mean of |log r| under this name, which
    cannot be compared with other losses).
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
    """[M] bool, true for the tokens that the first entries of `index` name.

    Args:
        index: token numbers, the first choice first.
        ratio: number of chosen tokens, as a fraction of M; at least one token is chosen.
        tokens: the M tokens.
    """
    flags = np.zeros(len(tokens.keys), dtype=bool)
    flags[index[: max(1, int(ratio * len(flags)))]] = True
    return flags
