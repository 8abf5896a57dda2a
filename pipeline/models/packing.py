"""Packs of contexts become the tensors of a forward pass.

A pack is one context, or several behind one copy of their prompt (`sharing.py`). Packs are padded on the right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from pipeline.models.batch import TokenBatch, TrainBatch, ranges


@dataclass
class ModelInputs:
    """Input of one forward pass: B packs of T positions, with N predicted response tokens of S rows."""

    input_ids: Tensor
    """[B, T] int64, a prompt and one or more responses, padded on the right."""
    lengths: Tensor
    """[B] int64, tokens of each pack that are not padding."""
    positions: Tensor | None
    """[B, T] int64, positions in each context; None where every pack is one context."""
    segment_ids: Tensor | None
    """[B, T] int64, 0 in the prompt, k in the k-th response of the pack, -1 in padding; None as `positions`."""
    logit_index: Tensor
    """[N] int64, index into the B * T positions of the token before each response token, which predicts it."""
    targets: Tensor
    """[N] int64, the response tokens."""
    row_index: Tensor
    """[N] int64, row of each response token, below `sequences`: all contexts of a row have one number, if they stand
    together in `packs`."""
    sequences: int
    """S, the number of rows; 1 without rows."""
    token_index: np.ndarray
    """[N] int64, index of each response token into arrays of `TokenBatch`; stays on the CPU."""

    def to(self, device: torch.device | str) -> Self:
        """The same batch with its tensors on `device`."""
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            moved[name] = value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        return type(self)(**moved)


@dataclass
class MicroBatch(ModelInputs):
    """Tensors of one forward and backward pass: the columns [N] of `TrainBatch`."""

    loss_mask: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor
    returns: Tensor
    ref_log_probs: Tensor | None
    values: Tensor | None
    weights: Tensor | None
    token_mask: Tensor | None
    pair_margin: Tensor | None


def pack(
    rows: TokenBatch, packs: Sequence[Sequence[int]], pad_token_id: int = 0, read: np.ndarray | None = None
) -> ModelInputs:
    """Model inputs of the contexts in `packs`, in that order; those of a pack share one prompt (`sharing.py`).

    Of response tokens that are not in `read` [N] (bool, None for all), nothing is predicted: they stand in `input_ids`
    alone, as prompts do.

    Without packs they are one pad token and no response token (N = 0): a pass over them keeps this rank in step with
    the others, and its gradient is exactly 0.
    """
    order = np.asarray([context for members in packs for context in members], dtype=np.int64)
    sizes = np.asarray([len(members) for members in packs], dtype=np.int64)
    first = np.cumsum(sizes) - sizes  # position in `order` of each pack's first context
    prompt_starts = rows.prompt_offsets[order[first]]
    prompt_counts = rows.prompt_offsets[order[first] + 1] - prompt_starts
    starts = rows.response_offsets[order]
    counts = rows.response_offsets[order + 1] - starts
    before = np.cumsum(counts) - counts  # response tokens of all contexts before
    before_in_pack = before - np.repeat(before[first], sizes)
    lengths = prompt_counts + np.add.reduceat(counts, first) if len(sizes) else np.ones(1, dtype=np.int64)
    width = max(int(lengths.max()), 1)

    # Indices into the B * T positions.
    pack_starts = np.arange(len(sizes)) * width
    prompt_ends = pack_starts + prompt_counts
    prompt_index = ranges(pack_starts, prompt_counts)
    response_index = ranges(np.repeat(prompt_ends, sizes) + before_in_pack, counts)
    # A token is predicted at the token before it; the first token of a response at the prompt's last token.
    logit_index = response_index - 1
    not_empty = counts > 0
    logit_index[before[not_empty]] = np.repeat(prompt_ends, sizes)[not_empty] - 1

    token_index = ranges(starts, counts)
    targets = rows.response_ids[token_index].astype(np.int64)
    shape = len(lengths), width
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    input_ids.flat[prompt_index] = rows.prompt_ids[ranges(prompt_starts, prompt_counts)]
    input_ids.flat[response_index] = targets
    positions = segment_ids = None
    if len(order) > len(sizes):
        positions = np.zeros(shape, dtype=np.int64)
        positions.flat[prompt_index] = ranges(np.zeros_like(prompt_counts), prompt_counts)
        positions.flat[response_index] = ranges(np.repeat(prompt_counts, sizes), counts)
        segment_ids = np.full(shape, -1, dtype=np.int64)
        segment_ids.flat[prompt_index] = 0
        segment_ids.flat[response_index] = np.repeat(np.arange(len(order)) - np.repeat(first, sizes) + 1, counts)
    row_number = np.arange(len(order))
    if not rows.are_contexts:
        # Not the rows' own numbers: their order is that of the packs.
        row_number = np.cumsum(np.diff(rows.rows_of(order), prepend=-1) != 0) - 1
    row_index = np.repeat(row_number, counts)
    if read is not None:
        chosen = read[token_index]
        logit_index, targets, row_index, token_index = (
            values[chosen] for values in (logit_index, targets, row_index, token_index)
        )
    return ModelInputs(
        input_ids=torch.from_numpy(input_ids),
        lengths=torch.from_numpy(lengths),
        positions=None if positions is None else torch.from_numpy(positions),
        segment_ids=None if segment_ids is None else torch.from_numpy(segment_ids),
        logit_index=torch.from_numpy(logit_index),
        targets=torch.from_numpy(targets),
        row_index=torch.from_numpy(row_index),
        sequences=int(row_number[-1]) + 1 if len(order) else 1,
        token_index=token_index,
    )


def collate(rows: TrainBatch, packs: Sequence[Sequence[int]], pad_token_id: int = 0) -> MicroBatch:
    """The micro-batch of the contexts in `packs`, in that order; see `pack`. Of tokens that do not train, such as those
    of tools and environments, it has nothing but their ids."""
    inputs = pack(rows, packs, pad_token_id, rows.mask > 0)
    columns: dict[str, Any] = {}
    for name in MicroBatch.__annotations__:
        values = getattr(rows, name)
        columns[name] = None if values is None else torch.from_numpy(values[inputs.token_index])
    return MicroBatch(**vars(inputs), **columns)
