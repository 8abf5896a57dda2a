"""Builds the tensors of a forward pass from packs of contexts.

A context is a prompt and its response. A pack is one context, or the responses of several contexts after one copy of
their common prompt (`sharing.py`). Packs lie end to end in one sequence (`attention.py`), or, for models that cannot
attend over such a sequence, in one row each, padded on the right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.models.attention import Layout, layout
from pipeline.models.batch import TokenBatch, TrainBatch, ranges
from pipeline.models.sequence_parallel import Share
from pipeline.models.support import Support
from pipeline.rows import UNROUTED


@dataclass
class ImageInputs:
    """The images of one forward pass, with n features in all."""

    index: Tensor
    """[n] int64, positions of the features in the packed sequence, in ascending order."""
    pixels: dict[str, Tensor]
    """Input of the vision tower by name; empty without images."""

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on `device`."""
        pixels = {name: values.to(device, non_blocking=True) for name, values in self.pixels.items()}
        return type(self)(self.index.to(device, non_blocking=True), pixels)


PlaceImages = Callable[
    [TokenBatch, Sequence[Sequence[int]], np.ndarray, np.ndarray, np.ndarray, Tensor], tuple[ImageInputs, Tensor]
]
"""Function such as `ImageReader.place`."""


@dataclass
class ModelInputs:
    """Input of one forward pass: B packs, in which N response tokens of S rows are predicted."""

    input_ids: Tensor
    """[1, T] int64, the packs end to end, each a prompt and one or more responses; or [B, T], one context per row,
    padded on the right."""
    lengths: Tensor
    """[B] int64, number of tokens of each pack in `input_ids`."""
    positions: Tensor | None
    """[1, T] int64, positions in each context; [3, 1, T] with images, in families with three axes; None if packs are
    padded."""
    packing: Layout | None
    """Layout of the contexts in the sequence; None if packs are padded."""
    logit_index: Tensor
    """[N] int64, index into the flattened `input_ids` of the token before each response token. The hidden state there
    predicts the response token."""
    targets: Tensor
    """[N] int64, the response tokens."""
    row_index: Tensor
    """[N] int64, number of the row that each response token belongs to, from 0 to `sequences` - 1. All contexts of a
    row have the same number, if they are neighbours in `packs`."""
    sequences: int
    """S, the number of rows; 1 if there are none."""
    token_index: np.ndarray
    """[N] int64, index of each response token into arrays of `TokenBatch` of length N; stays on the CPU."""
    images: ImageInputs | None
    """The images of the packs; None if the rows have no column of images."""
    support: Support | None
    """Supports of the response tokens; None if no row has one."""
    routes: Tensor | None
    """[tokens in `input_ids`, W] int16, experts of each token, layer after layer, `UNROUTED` if unknown; None if no row
    has any."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `Policy.forward` for this pass."""
        names = ("input_ids", "logit_index", "targets", "positions", "packing", "images", "support", "routes")
        return {name: getattr(self, name) for name in names}

    def to(self, device: torch.device | str) -> Self:
        """Return a copy with the tensors on `device`."""
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                value = value.to(device, non_blocking=True)
            moved[name] = value.to(device) if isinstance(value, Layout | ImageInputs | Support) else value
        return type(self)(**moved)


@dataclass
class MicroBatch(ModelInputs):
    """Tensors of one forward and backward pass: model inputs, and the columns of `TrainBatch` with the same names, [N],
    at the N predicted tokens."""

    loss_mask: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor
    returns: Tensor
    ref_log_probs: Tensor | None
    teacher_top_ids: Tensor | None
    teacher_top_log_probs: Tensor | None
    values: Tensor | None
    weights: Tensor | None
    token_mask: Tensor | None
    pair_margin: Tensor | None


def pack(
    rows: TokenBatch,
    packs: Sequence[Sequence[int]],
    pad_token_id: int = 0,
    read: np.ndarray | None = None,
    packed: bool = False,
    sequence: dist.ProcessGroup | None = None,
    place_images: PlaceImages | None = None,
) -> ModelInputs:
    """Build the model inputs of the contexts in `packs`, in that order.

    The last token of a response predicts nothing and no other token attends to it, so it is not in `input_ids`.

    Without packs, `input_ids` has only pad tokens, and N = 0. A pass over such inputs keeps this rank in step with the
    others, and its gradient is exactly 0.

    Args:
        rows: the rows.
        packs: context numbers of each pack; the contexts of a pack have the same prompt (`sharing.py`).
        pad_token_id: id of the padding.
        read: bool, one entry per response token of `rows`, true for tokens to predict; None predicts all. The others
            are only in `input_ids`, as prompts are.
        packed: whether packs lie end to end, for models that can take this (`sharing.Passes`); else packs are padded,
            and each must be one context.
        sequence: ranks among which the positions are divided equally; pad tokens at the end make them divisible.
        place_images: puts the images of `rows` into the pass; None for a model of text.

    Raises ValueError if rows with images are padded, or `place_images` raises it.
    """
    order = np.asarray([context for members in packs for context in members], dtype=np.int64)
    sizes = np.asarray([len(members) for members in packs], dtype=np.int64)
    first = np.cumsum(sizes) - sizes  # position in `order` of each pack's first context
    prompt_starts = rows.prompt_offsets[order[first]]
    prompt_counts = rows.prompt_offsets[order[first] + 1] - prompt_starts
    starts = rows.response_offsets[order]
    counts = rows.response_offsets[order + 1] - starts
    fed = np.maximum(counts - 1, 0)  # response tokens in `input_ids`
    before = np.cumsum(fed) - fed  # fed tokens of all contexts before
    before_in_pack = before - np.repeat(before[first], sizes)
    lengths = prompt_counts + np.add.reduceat(fed, first) if len(sizes) else np.ones(1, dtype=np.int64)

    # Indices into the flat positions.
    tokens, ranks = int(lengths.sum()) if len(sizes) else 0, sequence.size() if sequence else 1
    total = -(-max(tokens, 1) // ranks) * ranks
    shape = (1, total) if packed else (len(lengths), max(int(lengths.max()), 1))
    pack_starts = (np.cumsum(lengths) - lengths if packed else np.arange(len(lengths)) * shape[1])[: len(sizes)]
    prompt_ends = pack_starts + prompt_counts
    prompt_index = ranges(pack_starts, prompt_counts)
    response_starts = np.repeat(prompt_ends, sizes) + before_in_pack
    response_index = ranges(response_starts, fed)
    # A token is predicted at the token before it; the first token of a response at the prompt's last token.
    logit_index = ranges(response_starts - 1, counts)
    not_empty = counts > 0
    logit_index[(np.cumsum(counts) - counts)[not_empty]] = np.repeat(prompt_ends, sizes)[not_empty] - 1

    token_index = ranges(starts, counts)
    targets = rows.response_ids[token_index].astype(np.int64)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    input_ids.flat[prompt_index] = rows.prompt_ids[ranges(prompt_starts, prompt_counts)]
    input_ids.flat[response_index] = rows.response_ids[ranges(starts, fed)]
    positions = where = None
    if packed:
        positions = np.zeros(shape, dtype=np.int64)
        positions.flat[prompt_index] = ranges(np.zeros_like(prompt_counts), prompt_counts)
        positions.flat[response_index] = ranges(np.repeat(prompt_counts, sizes), fed)
        own = fed.copy()
        own[first] += prompt_counts
        described = (np.repeat(pack_starts, sizes), np.repeat(prompt_counts, sizes), response_starts, fed)
        contexts = np.stack(described, 1)[own > 0]
        if total > tokens:  # the pad tokens are a prompt without a response
            contexts = np.concatenate([contexts, [[tokens, total - tokens, total, 0]]])
        where = layout(contexts, total)
    routes = None
    if rows.routes is not None:
        routes = np.full((input_ids.size, rows.routes.shape[1]), UNROUTED, np.int16)
        begins = rows.token_offsets[order]
        routes[prompt_index] = rows.routes[ranges(begins[first], prompt_counts)]
        routes[response_index] = rows.routes[ranges(begins + np.repeat(prompt_counts, sizes), fed)]
    row_number = np.arange(len(order))
    if not rows.are_contexts:
        # Not the rows' own numbers: rows are numbered in the order of the packs.
        row_number = np.cumsum(np.diff(rows.rows_of(order), prepend=-1) != 0) - 1
    row_index = np.repeat(row_number, counts)
    if read is not None:
        chosen = read[token_index]
        logit_index, targets, row_index, token_index = (
            values[chosen] for values in (logit_index, targets, row_index, token_index)
        )
    if where is not None and sequence is not None:
        mine = np.flatnonzero(logit_index // (total // ranks) == sequence.rank())
        where = replace(where, share=Share(sequence, torch.from_numpy(mine)))
    positioned = None if positions is None else torch.from_numpy(positions)
    images = None
    if rows.images is not None and place_images is not None:
        if positioned is None:
            raise ValueError(
                "rows with images must be packed, and this model gets padded rows; train it without images"
            )
        images, positioned = place_images(rows, packs, pack_starts, response_starts, fed, positioned)
    return ModelInputs(
        input_ids=torch.from_numpy(input_ids),
        lengths=torch.from_numpy(lengths),
        positions=positioned,
        packing=where,
        logit_index=torch.from_numpy(logit_index),
        targets=torch.from_numpy(targets),
        row_index=torch.from_numpy(row_index),
        sequences=int(row_number[-1]) + 1 if len(order) else 1,
        token_index=token_index,
        images=images,
        support=rows.supports(token_index),
        routes=None if routes is None else torch.from_numpy(routes),
    )


def collate(
    rows: TrainBatch,
    packs: Sequence[Sequence[int]],
    pad_token_id: int = 0,
    packed: bool = False,
    sequence: dist.ProcessGroup | None = None,
    place_images: PlaceImages | None = None,
) -> MicroBatch:
    """Build the micro-batch of the contexts in `packs`, in that order. Arguments are as in `pack`.

    Tokens that do not train, such as tokens of tools and environments, are in `input_ids`, but are not predicted.
    """
    inputs = pack(rows, packs, pad_token_id, rows.mask > 0, packed, sequence, place_images)
    columns: dict[str, Any] = {}
    for name in MicroBatch.__annotations__:
        values = getattr(rows, name)
        columns[name] = None if values is None else torch.from_numpy(values[inputs.token_index])
    return MicroBatch(**vars(inputs), **columns)


def lay_out(
    sequences: Sequence[np.ndarray],
    packed: bool,
    images: Sequence[Sequence[bytes]] | None = None,
    place_images: PlaceImages | None = None,
) -> ModelInputs:
    """Build the model inputs of whole token sequences, without predictions (N = 0), such as for the reward model.

    Args:
        sequences: token ids [length] int of each sequence.
        packed: whether sequences lie end to end; else they are padded.
        images: encoded images of each sequence; None for text.
        place_images: as in `pack`.
    """
    rows = TokenBatch.of(sequences, images=images)
    return pack(rows, [[row] for row in range(len(rows))], packed=packed, place_images=place_images)
