"""From token losses to one number, normalised over the whole global mini-batch."""

import torch
from torch import Tensor

from pipeline.config.learner import AGG_MODES


def agg_loss(
    per_token: Tensor,
    mask: Tensor,
    mode: str,
    *,
    global_tokens: float,
    global_sequences: float,
    row_index: Tensor | None = None,
    sequences: int | None = None,
    scale_factor: float | None = None,
) -> Tensor:
    """A micro-batch's share of the loss of the global mini-batch; over all micro-batches and ranks these add up to

    - `token-mean`: sum_t loss / global_tokens
    - `token-sum`: sum_t loss
    - `seq-mean-token-sum`: sum_t loss / global_sequences
    - `seq-mean-token-sum-norm`: sum_t loss / (global_sequences * scale_factor), Dr.GRPO's constant length divisor
    - `seq-mean-token-mean`: sum_s (sum_t loss / tokens of s) / global_sequences

    for tokens t and sequences s. If the counts are not known yet, pass 1 for both and divide by `agg_divisor` later.
    Sequences without unmasked tokens do not count. An empty mask gives 0, never NaN, and `backward` works.

    Args:
        per_token: [N] losses.
        mask: [N] 1 where the token counts.
        mode: one of `AGG_MODES`.
        global_tokens: unmasked tokens of the global mini-batch.
        global_sequences: sequences with an unmasked token in the global mini-batch.
        row_index: [N] sequence number of each token, for `seq-mean-token-mean`. Sequences are never split.
        sequences: S; None takes `row_index.max() + 1`, which waits for the device.
        scale_factor: divisor of `seq-mean-token-sum-norm`.

    Raises:
        ValueError: the mode is unknown, or an argument that it needs is missing or not positive.
    """
    if mode not in AGG_MODES:
        raise ValueError(f"actor.loss_agg_mode {mode!r} is unknown; it is one of {', '.join(AGG_MODES)}")
    keep = mask > 0
    losses = torch.where(keep, per_token, per_token.new_zeros(()))
    if mode == "token-sum":
        return losses.sum()
    if mode == "token-mean":
        return losses.sum() / max(global_tokens, 1)
    # With a count of 0 the numerator is 0, and any divisor will do.
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
    if row_index is None:
        raise ValueError("seq-mean-token-mean needs the sequence number of each token (row_index)")
    if sequences is None:
        sequences = int(row_index.max()) + 1 if row_index.numel() else 0
    tokens = losses.new_zeros(sequences).index_add_(0, row_index, keep.to(losses.dtype))
    return (losses / tokens.clamp(min=1.0)[row_index]).sum() * per_sequence


def agg_divisor(mode: str, global_tokens: float, global_sequences: float) -> float:
    """`agg_loss` with counts of 1, divided by this number, is `agg_loss` with these counts."""
    if mode == "token-sum":
        return 1.0
    return max(global_tokens if mode == "token-mean" else global_sequences, 1.0)
