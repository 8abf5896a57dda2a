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
    """This micro-batch's share of the loss of the whole global mini-batch.

    With the sums over all tokens t (or sequences s with tokens t) of all micro-batches on all ranks:

    - `token-mean`: sum_t loss / global_tokens
    - `token-sum`: sum_t loss
    - `seq-mean-token-sum`: sum_t loss / global_sequences
    - `seq-mean-token-sum-norm`: sum_t loss / (global_sequences * scale_factor); Dr.GRPO's constant length divisor
    - `seq-mean-token-mean`: sum_s (sum_t loss / tokens of s) / global_sequences

    Where the counts are not known yet, both may be given as 1 and what comes out divided by `agg_divisor` afterwards.
    A sequence whose tokens are all masked counts as no sequence. Empty masks give 0, never NaN, and keep the graph so
    that `backward` works. Entropy and KL are aggregated by the same function in the same mode.

    Args:
        per_token: [N] losses.
        mask: [N] 1 where the token counts.
        mode: one of `AGG_MODES`.
        global_tokens: tokens that count in the global mini-batch.
        global_sequences: sequences with at least one such token in the global mini-batch.
        row_index: [N] sequence number of each token; needed by `seq-mean-token-mean` only. Sequences are whole.
        sequences: S; null takes `row_index.max() + 1`, which waits for the device.
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
    if row_index is None:
        raise ValueError("seq-mean-token-mean needs the sequence number of each token (row_index)")
    if sequences is None:
        sequences = int(row_index.max()) + 1 if row_index.numel() else 0
    tokens = losses.new_zeros(sequences).index_add_(0, row_index, keep.to(losses.dtype))
    return (losses / tokens.clamp(min=1.0)[row_index]).sum() * per_sequence


def agg_divisor(mode: str, global_tokens: float, global_sequences: float) -> float:
    """What `agg_loss` with counts of 1 has to be divided by to be `agg_loss` with these counts."""
    if mode == "token-sum":
        return 1.0
    return max(global_tokens if mode == "token-mean" else global_sequences, 1.0)
