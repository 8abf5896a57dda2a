"""Policy losses with one probability ratio for a whole sequence, that is, for the response of a row."""

import torch
from torch import Tensor

from pipeline.config.learner import ActorConfig
from pipeline.losses.ppo import ppo_clip
from pipeline.losses.registry import LossInput, Sums, token_sums

MAX_LOG_SEQUENCE_RATIO = 10.0
"""Largest log ratio of a sequence in GSPO, in nats; larger ones are clamped (e^10 is about 2.2e4)."""


def gspo(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """GSPO, group sequence policy optimisation (Zheng et al. 2025, arXiv 2507.18071), token-level form (section 4.3).

    The ratio of a sequence is s = exp(mean over its tokens of log r). Token t has the ratio s_t = s * p_t / sg(p_t);
    p_t is the token's probability, and sg stops the gradient. The loss of a token is `ppo_clip` of s_t. With
    `seq-mean-token-mean` and one advantage per sequence the gradient equals the gradient of the sequence-level form.
    The paper's clip bounds are 3e-4 (low) and 4e-4 (high).

    Metrics: `pg_clipfrac`, tokens whose clipped term is the larger one (no gradient); `ppo_kl`.
    """
    log_probs = data.masked(data.log_probs)
    # The mean of the unclamped log ratios: clamping one outlier would change the ratio of the sequence.
    log_ratio = data.sequence_mean(data.log_probs.detach() - data.old_log_probs)[data.row_index]
    ratio = (log_ratio + (log_probs - log_probs.detach())).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    per_token, clipped = ppo_clip(data.masked(data.advantages), ratio, config)
    return per_token, token_sums(data, pg_clipfrac=clipped)


def geo_mean(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """GMPO, geometric-mean policy optimisation (Zhao et al. 2025, arXiv 2507.20673).

    The loss of a sequence is -A exp(mean over its tokens of the clipped log r), with A the mean advantage of the
    sequence's tokens. Only one side of log r is clipped, as in PPO: at most `clip_ratio_high` if A > 0, at least
    -`clip_ratio_low` if A < 0. The paper takes 0.4 for both bounds. Each token has the loss of its sequence, so
    `seq-mean-token-mean` gives the mean over sequences.

    verl differs in three points. It ignores the aggregation mode. It multiplies a sequence's loss by the geometric mean
    of the sequence's importance weights (here each weight multiplies its token's loss). It chooses the side of the clip
    by the sign of each token's advantage: the result is the same if all tokens of a sequence have one advantage;
    otherwise, tokens with the other sign are not clipped on the side that lowers the loss.

    Metrics:
    `pg_clipfrac`: tokens of sequences with A > 0 at the upper bound (no gradient);
    `pg_clipfrac_lower`: tokens of sequences with A < 0 at the lower bound (no gradient either);
    `ppo_kl`.
    """
    log_ratio = data.log_ratio
    advantages = data.sequence_mean(data.advantages)
    good, bad = (advantages > 0)[data.row_index], (advantages < 0)[data.row_index]
    clipped = torch.where(
        good, log_ratio.clamp(max=config.clip_high), torch.where(bad, log_ratio.clamp(min=-config.clip_low), log_ratio)
    )
    losses = -advantages * data.sequence_mean(clipped).exp()
    above, below = log_ratio > config.clip_high, log_ratio < -config.clip_low
    sums = token_sums(data, pg_clipfrac=good & above, pg_clipfrac_lower=bad & below)
    return data.masked(losses[data.row_index]), sums
