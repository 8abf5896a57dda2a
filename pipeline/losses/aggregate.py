"""Aggregation of token losses to one number, divided by counts of the whole global mini-batch."""

import torch
from torch import Tensor

from pipeline.config.learner import AGG_MODES


def agg_loss(
    per_token: Tensor, mask: Tensor, mode: str, row_index: Tensor, sequences: int, scale_factor: float
) -> Tensor:
    """Return a micro-batch's summand of the loss. The sum over all micro-batches, divided by `agg_divisor`, is

    - `token-mean`: sum_t loss / tokens
    - `token-sum`: sum_t loss
    - `seq-mean-token-sum`: sum_t loss / sequences
    - `seq-mean-token-sum-norm`: sum_t loss / (sequences * scale_factor), Dr.GRPO's constant length divisor
    - `seq-mean-token-mean`: sum_s (sum_t loss / tokens of s) / sequences

    for unmasked tokens t, and for sequences s that have one. If all tokens are masked, the result is 0, never NaN, and
    `backward` works.

    Args:
        per_token: [N] losses.
        mask: [N] 1 if the token counts.
        mode: one of `AGG_MODES`.
        row_index: [N] sequence number of each token. Sequences are never split.
        sequences: S, number of sequences.
        scale_factor: divisor of `seq-mean-token-sum-norm`, above 0.

    Raises ValueError for an unknown mode.
    """
    if mode not in AGG_MODES:
        raise ValueError(f"actor.loss_agg_mode {mode!r} is unknown; it is one of {', '.join(AGG_MODES)}")
    keep = mask > 0
    losses = torch.where(keep, per_token, per_token.new_zeros(()))
    if mode == "seq-mean-token-mean":
        tokens = losses.new_zeros(sequences).index_add_(0, row_index, keep.to(losses.dtype))
        return (losses / tokens.clamp(min=1.0)[row_index]).sum()
    if mode == "seq-mean-token-sum-norm":
        return losses.sum() * (1.0 / scale_factor)
    return losses.sum()


def agg_divisor(mode: str, tokens: float, sequences: float) -> float:
    """Divisor of the summed loss of a global mini-batch.

    Args:
        mode: one of `AGG_MODES`.
        tokens: number of unmasked tokens in the global mini-batch.
        sequences: number of sequences with an unmasked token.
    """
    if mode == "token-sum":
        return 1.0
    return max(tokens if mode == "token-mean" else sequences, 1.0)
