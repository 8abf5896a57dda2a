"""Losses of the policy update, as pure functions of tensors.

Chosen, and why:

1. Tokens are flat. A micro-batch is the response tokens of its sequences one after the other, `[N]`, and `segment [N]`
   says which of the S sequences a token belongs to. Padding does not exist here, so it cannot change a loss.
2. A loss is normalised by the counts of the whole global mini-batch, which the caller passes in. What `agg_loss`
   returns for one micro-batch is that micro-batch's share, and the shares of all micro-batches on all ranks add up to
   the loss of the mini-batch. How rows are split over micro-batches and ranks changes neither loss nor gradient.
   (`pipeline/train/fsdp.py` sums gradients over ranks, so nobody multiplies by their number.)
3. Metrics come as sums with their count, for the same reason.
4. Masked tokens are replaced before any arithmetic, so a NaN behind the mask reaches neither loss nor gradient.

A further loss is one function under `@register_policy_loss("name")`.
"""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Protocol, TypeVar

import torch
from torch import Tensor

AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to plus or minus this, so that `exp` stays finite (e^20 is about 4.9e8)."""

Sums = dict[str, tuple[Tensor, Tensor]]
"""Metric name to (sum, count), both detached scalars; the metric is the total of sums over the total of counts."""


class PolicyLoss(Protocol):
    """Signature of a registered policy loss."""

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        segment: Tensor,
        *,
        clip_ratio_low: float,
        clip_ratio_high: float,
        clip_ratio_c: float,
    ) -> tuple[Tensor, Sums]:
        """Loss of each token and the sums of its metrics.

        Args:
            log_probs: [N] log-probs of the response tokens under the policy that is trained; carries the gradient.
            old_log_probs: [N] log-probs under the policy the ratio is taken against.
            advantages: [N], one per token.
            mask: [N] 1 where the token is trained on, else 0 (any dtype).
            segment: [N] int64 sequence number of each token within the micro-batch; sequences are never split.
            clip_ratio_low: the ratio is clipped below at 1 - clip_ratio_low.
            clip_ratio_high: the ratio is clipped above at 1 + clip_ratio_high.
            clip_ratio_c: bound of the dual clip, above 1.

        Returns:
            per-token losses [N], 0 where masked, and `{"pg_clipfrac": (sum, count), ...}`.
        """
        ...


_F = TypeVar("_F", bound=PolicyLoss)
_POLICY_LOSSES: dict[str, PolicyLoss] = {}


def register_policy_loss(name: str) -> Callable[[_F], _F]:
    """Decorator that makes a `PolicyLoss` known under `name`.

    Raises:
        ValueError: the name is taken by another function.
    """

    def register(function: _F) -> _F:
        if _POLICY_LOSSES.get(name, function) is not function:
            raise ValueError(f"policy loss {name!r} is registered twice; give the second one another name")
        _POLICY_LOSSES[name] = function
        return function

    return register


def get_policy_loss(name: str) -> PolicyLoss:
    """The policy loss registered under `name`.

    Raises:
        ValueError: no such loss; the sentence names the nearest one.
    """
    if name not in _POLICY_LOSSES:
        near = get_close_matches(name, _POLICY_LOSSES, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"policy loss {name!r} is unknown.{hint} Known are {', '.join(sorted(_POLICY_LOSSES))}.")
    return _POLICY_LOSSES[name]


@register_policy_loss("vanilla")
def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segment: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> tuple[Tensor, Sums]:
    """PPO's clipped loss (Schulman et al. 2017, equation 7) with separate clip bounds (DAPO) and the dual clip
    (Ye et al. 2020, equation 5).

    With r = exp(log_probs - old_log_probs):
    `max(-A r, -A clip(r, 1 - low, 1 + high))`, and where A < 0 at most `-A c`, so that one token whose probability
    rose a lot on a bad response cannot dominate the gradient.

    Shapes and arguments as in `PolicyLoss`; `segment` is not used. Metrics:
    `pg_clipfrac`: tokens whose clipped term is the larger one (they get no gradient);
    `pg_clipfrac_lower`: tokens with A < 0 held by the dual clip (no gradient either);
    `ppo_kl`: old_log_probs - log_probs (clamped like the ratio), the plain estimate of KL(old || new).

    Raises:
        ValueError: clip_ratio_c is not above 1, or a clip ratio is negative.
    """
    if clip_ratio_c <= 1.0:
        raise ValueError(f"actor.clip_ratio_c must be above 1, but is {clip_ratio_c}; the usual value is 3.0")
    if clip_ratio_low < 0.0 or clip_ratio_high < 0.0:
        raise ValueError(f"clip ratios must not be negative, but are {clip_ratio_low} (low), {clip_ratio_high} (high)")
    keep = mask > 0
    zero = log_probs.new_zeros(())
    log_ratio = torch.where(keep, log_probs - old_log_probs, zero).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages = torch.where(keep, advantages, zero)
    ratio = log_ratio.exp()

    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    ppo = torch.maximum(plain, clipped)
    bound = -advantages * clip_ratio_c
    negative = advantages < 0
    per_token = torch.where(negative, torch.minimum(ppo, bound), ppo)

    count = keep.sum()
    sums: Sums = {
        "pg_clipfrac": ((clipped > plain).sum(), count),
        "pg_clipfrac_lower": ((negative & (ppo > bound)).sum(), count),
        "ppo_kl": (-log_ratio.detach().double().sum(), count),
    }
    return per_token, sums


def agg_loss(
    per_token: Tensor,
    mask: Tensor,
    mode: str,
    *,
    global_tokens: float,
    global_sequences: float,
    segment: Tensor | None = None,
    sequences: int | None = None,
    scale_factor: float | None = None,
) -> Tensor:
    """This micro-batch's share of the loss of the whole global mini-batch.

    With the sums over all tokens t (or sequences s with tokens t) of all micro-batches on all ranks:

    - `token-mean`: sum_t loss / global_tokens
    - `token-sum`: sum_t loss
    - `seq-mean-token-sum`: sum_t loss / global_sequences
    - `seq-mean-token-sum-norm`: sum_t loss / (global_sequences * scale_factor); Dr.GRPO's constant length divisor
    - `seq-mean-token-mean`: sum_s (sum_t loss / tokens of s) / global_sequences

    A sequence whose tokens are all masked counts as no sequence. Empty masks give 0, never NaN, and keep the graph so
    that `backward` works. Entropy and KL are aggregated by the same function in the same mode.

    Args:
        per_token: [N] losses.
        mask: [N] 1 where the token counts.
        mode: one of `AGG_MODES`.
        global_tokens: tokens that count in the global mini-batch.
        global_sequences: sequences with at least one such token in the global mini-batch.
        segment: [N] sequence number of each token; needed by `seq-mean-token-mean` only. Sequences are whole.
        sequences: S; null takes `segment.max() + 1`, which waits for the device.
        scale_factor: divisor of `seq-mean-token-sum-norm`.

    Returns:
        scalar.

    Raises:
        ValueError: unknown mode, or an argument the mode needs is missing or not positive.
    """
    if mode not in AGG_MODES:
        raise ValueError(f"actor.loss_agg_mode {mode!r} is unknown; it is one of {', '.join(AGG_MODES)}")
    keep = mask > 0
    losses = torch.where(keep, per_token, per_token.new_zeros(()))
    if mode == "token-sum":
        return losses.sum()
    if mode == "token-mean":
        return losses.sum() / max(global_tokens, 1)
    # A count of 0 means that every token of the mini-batch is masked: the numerator is 0 and any divisor will do.
    per_sequence = 1.0 / max(global_sequences, 1)
    if mode == "seq-mean-token-sum":
        return losses.sum() * per_sequence
    if mode == "seq-mean-token-sum-norm":
        if scale_factor is None or scale_factor <= 0:
            raise ValueError(
                f"seq-mean-token-sum-norm needs a positive actor.loss_scale_factor, but it is {scale_factor}; "
                "data.max_response_length is the usual value"
            )
        return losses.sum() * (per_sequence / scale_factor)
    if segment is None:
        raise ValueError("seq-mean-token-mean needs the sequence number of each token (segment)")
    if sequences is None:
        sequences = int(segment.max()) + 1 if segment.numel() else 0
    tokens = losses.new_zeros(sequences).index_add_(0, segment, keep.to(losses.dtype))
    return (losses / tokens.clamp(min=1.0)[segment]).sum() * per_sequence
