"""Rows become micro-batches: which rows share a forward pass, and the tensors of that pass.

Chosen, and why:

1. Rows are grouped by length until the padded size, rows * longest row, reaches the token budget. Padding is small
   because neighbours in length share a batch, and every model that `transformers` knows takes padded batches. Rows
   with the same prompt may stand behind one copy of it, as a bundle (`sharing.py`); a bundle then counts as a row.
2. Ranks must run equally many forward passes (each one gathers weights from all ranks), so a rank can be asked for an
   exact number of parts; parts without rows become a batch of one token that trains nothing.
3. The response tokens are flat, `[N]`, as the losses want them, and cut out of Arrow's own buffers with numpy: no
   Python work per token.
4. Attention follows from lengths. `ids != pad` would mask a pad token that the policy itself chose.
"""

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pipeline.rows import flat


@dataclass
class Sequences:
    """Prompts with their responses, as flat numpy arrays; R rows with N response tokens in all."""

    prompt_ids: np.ndarray
    """int32, prompt tokens of all rows, one row after the other."""
    prompt_offsets: np.ndarray
    """[R + 1] int64, where each row's prompt begins in `prompt_ids`."""
    response_ids: np.ndarray
    """[N] int32."""
    response_offsets: np.ndarray
    """[R + 1] int64, where each row's response begins in the arrays of length N."""

    @classmethod
    def from_table(cls, table: pa.Table) -> "Sequences":
        """Flat views of the tokens of generated rows.

        Raises:
            ValueError: a response stands after an empty prompt.
        """
        tokens = Sequences(*flat(table, "prompt_ids"), *flat(table, "response_ids"))
        orphan = (np.diff(tokens.prompt_offsets) == 0) & (np.diff(tokens.response_offsets) > 0)
        if orphan.any():
            row = int(np.flatnonzero(orphan)[0])
            raise ValueError(
                f"row {row} (uid {_uid(table, row)}) has an empty prompt, and nothing predicts the first token of its "
                "response; the chat template must produce at least one token"
            )
        return tokens

    def __len__(self) -> int:
        return len(self.response_offsets) - 1

    @property
    def lengths(self) -> list[int]:
        """Prompt + response tokens of each row."""
        return (np.diff(self.prompt_offsets) + np.diff(self.response_offsets)).tolist()

    def bundle_lengths(self, bundles: Sequence[Sequence[int]]) -> list[int]:
        """Tokens of each bundle: those of its first row's prompt, and of all its rows' responses."""
        prompts, responses = np.diff(self.prompt_offsets), np.diff(self.response_offsets)
        return [int(prompts[bundle[0]] + responses[list(bundle)].sum()) for bundle in bundles]


@dataclass
class Rows(Sequences):
    """Rows of an iteration on one rank, with what the update reads of them."""

    mask: np.ndarray
    """[N] float32, 1 where the policy chose the token and trains on it."""
    rollout_log_probs: np.ndarray
    """[N] float32, log-probs of the engine."""
    old_log_probs: np.ndarray
    """[N] float32, log-probs the ratio is taken against. Begins as a copy of the engine's; the trainer writes its own
    here (`rows.old_log_probs[batch.flat] = ...`) when `actor.old_log_probs` is `recompute`."""
    advantages: np.ndarray
    """[N] float32."""
    returns: np.ndarray
    """[N] float32."""
    ids: np.ndarray
    """[R] uint64, what tells a row from all others of the run, on whichever rank it is (from uid and sample)."""
    ref_log_probs: np.ndarray | None = None
    """[N] float32, log-probs of the reference policy; None without one."""
    values: np.ndarray | None = None
    """[N] float32, the critic's values that the advantages were made with; None without a critic."""
    weights: np.ndarray | None = None
    """[N] float32, importance weights of the off-policy correction, once it has run."""
    selected: np.ndarray | None = None
    """[N] bool, tokens that the policy loss chose over the whole mini-batch, once it has."""

    @classmethod
    def from_table(cls, table: pa.Table) -> "Rows":
        """Flat views of a table of finished rows.

        Raises:
            ValueError: a list column has another length than `response_ids` in some row, an advantage that trains is
                not finite, or a response stands after an empty prompt.
        """
        tokens = Sequences.from_table(table)
        offsets = tokens.response_offsets
        columns: dict[str, np.ndarray] = {}
        optional = [name for name in ("ref_log_probs", "values") if name in table.column_names]
        for name in ("response_mask", "rollout_log_probs", "advantages", "returns", *optional):
            values, other = flat(table, name)
            if not np.array_equal(offsets, other):
                row = int(np.flatnonzero(np.diff(offsets) != np.diff(other))[0])
                raise ValueError(
                    f"row {row} (uid {_uid(table, row)}) has {np.diff(other)[row]} entries in {name!r} but "
                    f"{np.diff(offsets)[row]} response tokens; there must be one entry per response token"
                )
            columns[name] = values.astype(np.float32)
        bad = ~np.isfinite(columns["advantages"]) & (columns["response_mask"] > 0)
        if bad.any():
            row = int(np.searchsorted(offsets, np.flatnonzero(bad)[0], side="right")) - 1
            raise ValueError(f"row {row} (uid {_uid(table, row)}) has an advantage that is not a finite number")
        return cls(
            **vars(tokens),
            mask=columns["response_mask"],
            rollout_log_probs=columns["rollout_log_probs"],
            old_log_probs=columns["rollout_log_probs"].copy(),
            advantages=columns["advantages"],
            returns=columns["returns"],
            ids=_ids(table),
            **{name: columns[name] for name in optional},
        )

    @classmethod
    def join(cls, parts: Sequence["Rows"]) -> "Rows":
        """The rows of several parts, one part after the other, with all that has been written into them."""
        joined: dict[str, Any] = {}
        for name in vars(parts[0]):
            values = [getattr(part, name) for part in parts]
            if name.endswith("_offsets"):
                ends = np.cumsum([0, *(own[-1] for own in values)])
                joined[name] = np.concatenate([own[:-1] + end for own, end in zip(values, ends, strict=False)])
                joined[name] = np.append(joined[name], ends[-1])
            else:
                joined[name] = None if values[0] is None else np.concatenate(values)
        return cls(**joined)

    def mask_counts(self, index: list[int]) -> tuple[int, int]:
        """Tokens that train in these rows, and rows with at least one; summed over ranks they normalise the loss."""
        totals = np.concatenate([[0], np.cumsum(self.mask > 0)])
        per_row = np.diff(totals[self.response_offsets])[index]
        return int(per_row.sum()), int((per_row > 0).sum())

    def trained_tokens(self, index: list[int]) -> np.ndarray:
        """Places [M] in the arrays of length N of the tokens of these rows that train, row after row."""
        starts = self.response_offsets[index]
        taken = _spans(starts, self.response_offsets[np.asarray(index, dtype=np.int64) + 1] - starts)
        return taken[self.mask[taken] > 0]

    def random_keys(self, index: list[int], seed: int, step: int) -> np.ndarray:
        """[M] uniform numbers in [0, 1) for `trained_tokens(index)`, which depend on the seed, the step, the row and
        the token's place in it alone."""
        starts, stops = self.response_offsets[:-1], self.response_offsets[1:]
        drawn = [
            np.random.default_rng([seed, step, self.ids[row]]).random(stops[row] - starts[row])[
                self.mask[starts[row] : stops[row]] > 0
            ]
            for row in index
        ]
        return np.concatenate([np.empty(0), *drawn])

    def with_advantages(self, index: list[int]) -> list[int]:
        """Those of these rows that have a token that trains and whose advantage is not 0."""
        totals = np.concatenate([[0], np.cumsum((self.mask > 0) & (self.advantages != 0))])
        per_row = np.diff(totals[self.response_offsets])
        return [row for row in index if per_row[row]]


@dataclass
class Inputs:
    """What a model reads in one forward pass: B bundles of T positions, with N response tokens in S rows."""

    input_ids: Tensor
    """[B, T] int64, a prompt and one response or more, padded on the right."""
    lengths: Tensor
    """[B] int64, tokens of each bundle that are not padding."""
    positions: Tensor | None
    """[B, T] int64, places in each row's own sequence; None where every bundle is one row."""
    owners: Tensor | None
    """[B, T] int64, 0 in the prompt, k in the k-th response of the bundle, -1 in padding; None as `positions`."""
    select: Tensor
    """[N] int64, index into the B * T positions of the one that predicts each response token (the one before it)."""
    targets: Tensor
    """[N] int64, the response tokens."""
    segment: Tensor
    """[N] int64, row of each response token, below `sequences`."""
    sequences: int
    """S, the number of rows; 1 where there is none."""
    flat: np.ndarray
    """[N] int64, place of each response token in the arrays of `Sequences`; stays on the CPU."""

    def to(self, device: torch.device | str) -> Self:
        """The same batch with its tensors on `device`."""
        moved: dict[str, Any] = {
            k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in vars(self).items()
        }
        return type(self)(**moved)


@dataclass
class MicroBatch(Inputs):
    """Tensors of one forward and backward pass."""

    mask: Tensor
    """[N] float32."""
    old_log_probs: Tensor
    """[N] float32."""
    rollout_log_probs: Tensor
    """[N] float32."""
    advantages: Tensor
    """[N] float32."""
    returns: Tensor
    """[N] float32."""
    ref_log_probs: Tensor | None
    """[N] float32."""
    values: Tensor | None
    """[N] float32."""
    weights: Tensor | None
    """[N] float32."""
    selected: Tensor | None
    """[N] bool."""


def _ids(table: pa.Table) -> np.ndarray:
    names = zip(table["uid"].to_pylist(), table["sample"].to_pylist(), strict=True)
    digests = (hashlib.blake2b(f"{uid}/{sample}".encode(), digest_size=8).digest() for uid, sample in names)
    return np.frombuffer(b"".join(digests), dtype="<u8")


def _uid(table: pa.Table, row: int) -> str:
    return str(table["uid"][row].as_py())


def _spans(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[sum(counts)] the integers start, start + 1, ... of each span, one span after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)


def lay_out(rows: Sequences, bundles: Sequence[Sequence[int]], pad_token_id: int = 0) -> Inputs:
    """What a model reads of the rows of `bundles`, in that order; the rows of a bundle have one prompt (`sharing.py`).

    No bundles give one of one pad token and no response token (N = 0): its forward and backward pass keeps this rank in
    step with the others and contributes exact zeros.
    """
    order = np.asarray([row for bundle in bundles for row in bundle], dtype=np.int64)
    sizes = np.asarray([len(bundle) for bundle in bundles], dtype=np.int64)
    first = np.cumsum(sizes) - sizes  # place in `order` of each bundle's first row
    prompt_starts = rows.prompt_offsets[order[first]]
    prompt_counts = rows.prompt_offsets[order[first] + 1] - prompt_starts
    starts = rows.response_offsets[order]
    counts = rows.response_offsets[order + 1] - starts
    ends = np.cumsum(counts)
    before = ends - counts  # response tokens of all rows before
    own_before = before - np.repeat(before[first], sizes)  # of those in the same bundle
    lengths = prompt_counts + np.add.reduceat(counts, first) if len(sizes) else np.ones(1, dtype=np.int64)
    width = max(int(lengths.max()), 1)

    bundle_starts = np.arange(len(sizes)) * width
    prompt_ends = bundle_starts + prompt_counts
    taken = _spans(starts, counts)
    places = _spans(np.repeat(prompt_ends, sizes) + own_before, counts)
    # What predicts a token is the one before it, and the prompt's last one for the first token of each response.
    select = places - 1
    began = counts > 0
    select[before[began]] = np.repeat(prompt_ends, sizes)[began] - 1
    targets = rows.response_ids[taken].astype(np.int64)
    prompt_places = _spans(bundle_starts, prompt_counts)
    shape = len(lengths), width
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    input_ids.flat[prompt_places] = rows.prompt_ids[_spans(prompt_starts, prompt_counts)]
    input_ids.flat[places] = targets
    positions = owners = None
    if len(order) > len(sizes):
        positions, owners = np.zeros(shape, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
        positions.flat[prompt_places] = _spans(np.zeros_like(prompt_counts), prompt_counts)
        positions.flat[places] = _spans(np.repeat(prompt_counts, sizes), counts)
        owners.flat[prompt_places] = 0
        owners.flat[places] = np.repeat(np.arange(len(order)) - np.repeat(first, sizes) + 1, counts)
    return Inputs(
        input_ids=torch.from_numpy(input_ids),
        lengths=torch.from_numpy(lengths),
        positions=None if positions is None else torch.from_numpy(positions),
        owners=None if owners is None else torch.from_numpy(owners),
        select=torch.from_numpy(select),
        targets=torch.from_numpy(targets),
        segment=torch.from_numpy(np.repeat(np.arange(len(order)), counts)),
        sequences=max(len(order), 1),
        flat=taken,
    )


def collate(rows: Rows, bundles: Sequence[Sequence[int]], pad_token_id: int = 0) -> MicroBatch:
    """The micro-batch of the rows of `bundles`, in that order; see `lay_out`."""
    inputs = lay_out(rows, bundles, pad_token_id)

    def part(values: np.ndarray | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(values[inputs.flat])

    return MicroBatch(
        **vars(inputs),
        mask=torch.from_numpy(rows.mask[inputs.flat]),
        old_log_probs=torch.from_numpy(rows.old_log_probs[inputs.flat]),
        rollout_log_probs=torch.from_numpy(rows.rollout_log_probs[inputs.flat]),
        advantages=torch.from_numpy(rows.advantages[inputs.flat]),
        returns=torch.from_numpy(rows.returns[inputs.flat]),
        ref_log_probs=part(rows.ref_log_probs),
        values=part(rows.values),
        weights=part(rows.weights),
        selected=part(rows.selected),
    )


def _fill(sorted_lengths: list[int], budget: int) -> list[int]:
    """Sizes of the fewest batches that hold these lengths (longest first) within `budget` padded tokens each.

    Filling each batch with the longest rows left is optimal: any batch that holds the longest row has room for equally
    many, and taking longer ones leaves the shorter.
    """
    sizes: list[int] = []
    row = 0
    while row < len(sorted_lengths):
        size = min(budget // sorted_lengths[row], len(sorted_lengths) - row)
        sizes.append(size)
        row += size
    return sizes


def _longest_first(lengths: list[int], max_tokens: int) -> list[int]:
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    if order and lengths[order[0]] > max_tokens:
        longest = lengths[order[0]]
        raise ValueError(
            f"row {order[0]} has {longest} tokens (prompt + response), {longest - max_tokens} more than the "
            f"{max_tokens} that one forward pass may hold; raise actor.ppo_max_token_len_per_gpu to at least {longest}"
        )
    return order


def minimum_parts(lengths: list[int], max_tokens: int) -> int:
    """Fewest micro-batches that hold rows of these lengths within `max_tokens` padded tokens each; 0 without rows.

    Raises:
        ValueError: a single row is longer than `max_tokens`.
    """
    order = _longest_first(lengths, max_tokens)
    return len(_fill([max(lengths[row], 1) for row in order], max_tokens))


def split_micro_batches(lengths: list[int], max_tokens: int, parts: int | None = None) -> list[list[int]]:
    """Rows of each micro-batch: exactly `parts` of them, or the fewest possible when `parts` is None.

    Every row is in one batch, every batch has rows * longest <= max_tokens, and the largest padded size is as small as
    `parts` batches allow. No batch is empty as long as there are rows enough; with fewer rows than parts the last
    batches are empty lists. The longest rows come first, so that memory runs out at once or never. The result depends
    on the arguments alone.

    Args:
        lengths: prompt + response tokens of each row.
        max_tokens: `actor.ppo_max_token_len_per_gpu`.
        parts: number of micro-batches, at least `minimum_parts(lengths, max_tokens)`.

    Raises:
        ValueError: a single row is longer than `max_tokens`, or `parts` is below the minimum.
    """
    order = _longest_first(lengths, max_tokens)
    ordered = [max(lengths[row], 1) for row in order]
    fewest = len(_fill(ordered, max_tokens))
    if parts is None:
        parts = fewest
    if parts < fewest:
        raise ValueError(f"{len(lengths)} rows need at least {fewest} micro-batches, but {parts} were asked for")
    if not order:
        return [[] for _ in range(parts)]

    low, high = ordered[0], max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_fill(ordered, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    # (padded size, first, last + 1) of each batch; only those with rows to give away stay in the heap.
    lone: list[tuple[int, int, int]] = []
    heap: list[tuple[int, int, int]] = []

    def place(start: int, stop: int) -> None:
        batch = (-ordered[start] * (stop - start), start, stop)
        if stop - start > 1:
            heapq.heappush(heap, batch)
        else:
            lone.append(batch)

    start = 0
    for size in _fill(ordered, low):
        place(start, start + size)
        start += size
    while len(lone) + len(heap) < min(parts, len(order)):
        _, start, stop = heapq.heappop(heap)
        middle = (start + stop) // 2
        place(start, middle)
        place(middle, stop)
    filled = [order[start:stop] for _, start, stop in sorted(lone + heap, key=lambda batch: batch[1])]
    return filled + [[] for _ in range(parts - len(filled))]
