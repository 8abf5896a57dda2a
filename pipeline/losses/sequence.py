"""Losses whose ratio belongs to a whole sequence."""

import torch
from torch import Tensor

from pipeline.config.learner import ActorConfig
from pipeline.losses.ppo import ppo_clip
from pipeline.losses.registry import LossInput, Sums, register_policy_loss
from pipeline.losses.sums import token_sums

MAX_LOG_SEQUENCE_RATIO = 10.0
"""Log ratios of GSPO's sequences are clamped from above to this (e^10 is about 2.2e4)."""


@register_policy_loss("gspo", zero_without_advantage=True)
def gspo(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv 2507.18071), in its token-level form (section 4.3).

    The ratio is the sequence's, s = exp(mean over its tokens of log r), and each token carries it with a gradient of
    its own: s_t = s * p_t / sg(p_t), sg stopping the gradient. The loss is `ppo_clip` of s_t. With advantages constant
    over the sequence and `seq-mean-token-mean` its gradient is that of the clipped objective of s itself. The clip
    bounds are the sequence ratio's, for which the paper takes 3e-4 and 4e-4.

    Metrics: `pg_clipfrac`, tokens whose clipped term is the larger one (they get no gradient); `ppo_kl`.
    """
    log_probs = data.masked(data.log_probs)
    # The mean is of the log ratios as they are: one outlier clamped would make another sequence ratio of it.
    log_ratio = data.sequence_mean(data.log_probs.detach() - data.old_log_probs)[data.row_index]
    ratio = (log_ratio + (log_probs - log_probs.detach())).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    per_token, clipped = ppo_clip(data.masked(data.advantages), ratio, config)
    return per_token, token_sums(data, pg_clipfrac=clipped)


@register_policy_loss("geo_mean", zero_without_advantage=True)
def geo_mean(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """Geometric-mean policy optimisation, GMPO (Zhao et al. 2025, arXiv 2507.20673).

    A sequence's loss is -A exp(mean over its tokens of the clipped log r), A the mean advantage of its tokens. A log
    ratio is clipped from the side PPO clips: at most high where A > 0, at least -low where A < 0; `clip_ratio_low` and
    `clip_ratio_high` bound log ratios here, and the paper takes 0.4 for both. Each token of the sequence has the
    sequence's loss, so that `seq-mean-token-mean` is the mean over sequences; one without trained tokens adds nothing.

    It differs from verl's in three ways. Any aggregation mode holds, over the whole mini-batch. Importance weights
    multiply the tokens' losses, where verl multiplies the sequence's by their geometric mean. And the side of the clip
    follows the sequence's advantage, not the token's: the two agree where the advantage is constant over the sequence,
    the paper's case; elsewhere a token of the other sign would have had its ratio clipped from the wrong side, without
    a bound on the side that lowers the loss.

    Metrics:
    `pg_clipfrac`: tokens of sequences with A > 0 held at the upper bound (no gradient);
    `pg_clipfrac_lower`: tokens of sequences with A < 0 held at the lower bound (no gradient either);
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
