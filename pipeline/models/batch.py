"""Rows of the stream as flat numpy arrays, for the trainer and the scoring replicas."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.models.contexts import unfold
from pipeline.rows import loss_mask, per_token


@dataclass
class TokenBatch:
    """R rows as C contexts (`contexts.py`): prompts with their responses, N response tokens in all, as flat arrays."""

    prompt_ids: np.ndarray
    """int32, prompt tokens, context after context."""
    prompt_offsets: np.ndarray
    """[C + 1] int64, start of each context's prompt in `prompt_ids`."""
    response_ids: np.ndarray
    """[N] int32, response tokens, context after context."""
    response_offsets: np.ndarray
    """[C + 1] int64, start of each context's response in arrays of length N."""
    context_offsets: np.ndarray
    """[R + 1] int64, number of each row's first context."""

    @classmethod
    def from_table(cls, table: pa.Table) -> "TokenBatch":
        """Read the tokens of generated rows, as views of Arrow's buffers if rows are one context.

        Raises ValueError as `unfold` does.
        """
        return TokenBatch(*unfold(table))

    def __len__(self) -> int:
        return len(self.context_offsets) - 1

    @property
    def are_contexts(self) -> bool:
        """True if every row is one context, so that rows and contexts have the same numbers."""
        return bool(self.context_offsets[-1] == len(self))

    @property
    def row_offsets(self) -> np.ndarray:
        """[R + 1] int64, start of each row's response in arrays of length N."""
        return self.response_offsets[self.context_offsets]

    @property
    def lengths(self) -> list[int]:
        """Prompt + response tokens of each context."""
        return (np.diff(self.prompt_offsets) + np.diff(self.response_offsets)).tolist()

    def rows_of(self, contexts: np.ndarray) -> np.ndarray:
        """Return the row of each context, [C] int64 for `contexts` [C]."""
        return np.searchsorted(self.context_offsets, contexts, side="right") - 1

    def pack_lengths(self, packs: Sequence[Sequence[int]]) -> list[int]:
        """Count the tokens of each pack: one prompt, and the responses of all its contexts."""
        prompts, responses = np.diff(self.prompt_offsets), np.diff(self.response_offsets)
        return [int(prompts[pack[0]] + responses[list(pack)].sum()) for pack in packs]


@dataclass
class TrainBatch(TokenBatch):
    """Rows of an iteration on one rank, with the columns that the update reads."""

    mask: np.ndarray
    """[N] float32, 1 if the policy wrote the token and the row trains."""
    loss_mask: np.ndarray
    """[N] float32, tokens that count in the loss: `mask` without the tokens that the off-policy correction rejects."""
    rollout_log_probs: np.ndarray
    """[N] float32, log-probs of the engine."""
    old_log_probs: np.ndarray
    """[N] float32, log-probs of the ratio's denominator: the engine's, until the trainer overwrites them with its own
    (`actor.old_log_probs=recompute`)."""
    advantages: np.ndarray
    """[N] float32."""
    returns: np.ndarray
    """[N] float32."""
    ids: np.ndarray
    """[R] uint64, a hash of each row's uid and sample."""
    groups: np.ndarray
    """[R] uint64, a hash of each row's uid, which the samples of one prompt share."""
    ref_log_probs: np.ndarray | None = None
    """[N] float32, log-probs of the reference policy; None without one."""
    values: np.ndarray | None = None
    """[N] float32, the critic's values from which the advantages were computed; None without a critic."""
    weights: np.ndarray | None = None
    """[N] float32, importance weights of the off-policy correction, set by the actor."""
    token_mask: np.ndarray | None = None
    """[N] bool, tokens that the policy loss chose in the mini-batch, set by the actor."""
    pair_margin: np.ndarray | None = None
    """[N] float32, margin of the pair that the token belongs to, set by the actor for losses of pairs."""

    @classmethod
    def from_table(cls, table: pa.Table) -> "TrainBatch":
        """Read the columns of a table of finished rows.

        Raises:
            ValueError: as `unfold`, or a row has a list column with another length than `response_ids`, or an advantage
                that trains and is not finite.
        """
        tokens = TokenBatch.from_table(table)
        offsets = tokens.row_offsets
        optional = [name for name in ("ref_log_probs", "values") if name in table.column_names]
        columns = {
            name: per_token(table, name, offsets).astype(np.float32)
            for name in ("response_mask", "rollout_log_probs", "advantages", "returns", *optional)
        }
        mask = loss_mask(table)[0].astype(np.float32)
        bad = ~np.isfinite(columns["advantages"]) & (mask > 0)
        if bad.any():
            row = int(np.searchsorted(offsets, np.flatnonzero(bad)[0], side="right")) - 1
            raise ValueError(f"row {row} (uid {_uid(table, row)}) has an advantage that is not a finite number")
        uids = table["uid"].to_pylist()
        return cls(
            **vars(tokens),
            mask=mask,
            loss_mask=mask,
            rollout_log_probs=columns["rollout_log_probs"],
            old_log_probs=columns["rollout_log_probs"].copy(),
            advantages=columns["advantages"],
            returns=columns["returns"],
            ids=_hashes(f"{uid}/{sample}" for uid, sample in zip(uids, table["sample"].to_pylist(), strict=True)),
            groups=_hashes(uids),
            **{name: columns[name] for name in optional},
        )

    @classmethod
    def concat(cls, parts: Sequence["TrainBatch"]) -> "TrainBatch":
        """Join the rows of all parts in order, with all columns that the update has written."""
        joined: dict[str, Any] = {}
        for name in vars(parts[0]):
            values = [getattr(part, name) for part in parts]
            if name.endswith("_offsets"):
                # Each part's offsets begin at 0.
                ends = np.cumsum([offsets[-1] for offsets in values])
                shifted = [offsets[1:] + end - offsets[-1] for offsets, end in zip(values, ends, strict=True)]
                joined[name] = np.concatenate([[0], *shifted])
            else:
                joined[name] = None if values[0] is None else np.concatenate(values)
        return cls(**joined)

    def mask_counts(self, index: list[int]) -> tuple[int, int]:
        """Count the tokens of the loss mask in these rows, and the rows with such a token."""
        per_row = self._count(self.loss_mask > 0)[index]
        return int(per_row.sum()), int((per_row > 0).sum())

    def trained_tokens(self, index: list[int]) -> np.ndarray:
        """[M] indices into arrays of length N of these rows' tokens in the loss mask, row after row."""
        offsets = self.row_offsets
        starts = offsets[index]
        tokens = ranges(starts, offsets[np.asarray(index, dtype=np.int64) + 1] - starts)
        return tokens[self.loss_mask[tokens] > 0]

    def random_keys(self, index: list[int], seed: int, step: int) -> np.ndarray:
        """[M] uniform numbers in [0, 1) for `trained_tokens(index)`. They depend only on the seed, the step, the row
        and the token's position in the row's response."""
        drawn, offsets = [np.empty(0)], self.row_offsets
        for row in index:
            trained = self.loss_mask[offsets[row] : offsets[row + 1]] > 0
            drawn.append(np.random.default_rng([seed, step, self.ids[row]]).random(len(trained))[trained])
        return np.concatenate(drawn)

    def with_advantages(self, index: list[int]) -> list[int]:
        """Select the rows of `index` with a token in the loss mask whose advantage is not 0."""
        per_row = self._count((self.loss_mask > 0) & (self.advantages != 0))
        return [row for row in index if per_row[row]]

    def pairs(self, index: list[int]) -> np.ndarray:
        """[P, 2] for each group in `index`, one row with an advantage above 0 and one with an advantage below 0.

        Groups without one of them have no pair. A row's sign comes from its first trained token with an advantage.
        """
        signs = np.sign(self.advantages) * (self.loss_mask > 0)
        found: dict[int, list[int | None]] = {}
        for row in self.with_advantages(index):
            of_row = signs[self.row_offsets[row] : self.row_offsets[row + 1]]
            found.setdefault(int(self.groups[row]), [None, None])[int(of_row[of_row != 0][0] < 0)] = row
        return np.array([pair for pair in found.values() if None not in pair], dtype=np.int64).reshape(-1, 2)

    def _count(self, flags: np.ndarray) -> np.ndarray:
        """[R] true flags [N] of each row."""
        totals = np.concatenate([[0], np.cumsum(flags)])
        return np.diff(totals[self.row_offsets])


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[sum(counts)] the integers `start`, `start + 1`, ... of each range, range after range."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)


def _hashes(names: Iterable[str]) -> np.ndarray:
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), dtype="<u8")


def _uid(table: pa.Table, row: int) -> str:
    return str(table["uid"][row].as_py())
