"""Rows of the stream as flat numpy arrays, for the trainer and the scoring replicas."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch

from pipeline.models.contexts import unfold
from pipeline.models.head import TokenLists
from pipeline.models.support import Support
from pipeline.rows import UNKNOWN, UNROUTED, flat, loss_mask, per_token


@dataclass
class TokenBatch:
    """The tokens of R rows as flat arrays.

    The rows have C contexts in all (`contexts.py`), each a prompt and a response, and N response tokens in all.
    """

    prompt_ids: np.ndarray
    """[prompt tokens of all contexts] int32, context after context."""
    prompt_offsets: np.ndarray
    """[C + 1] int64, start of each context's prompt in `prompt_ids`."""
    response_ids: np.ndarray
    """[N] int32, response tokens, context after context."""
    response_offsets: np.ndarray
    """[C + 1] int64, start of each context's response in arrays of length N."""
    context_offsets: np.ndarray
    """[R + 1] int64, number of each row's first context, and C at the end."""
    images: np.ndarray | None = field(default=None, kw_only=True)
    """[R] object, tuple of the encoded images of each row, in prompt and response; None without a column `images`."""
    support_ids: np.ndarray | None = field(default=None, kw_only=True)
    """[M] int32, the supports of all response tokens, as in the column `support`; None if no row has one."""
    support_sizes: np.ndarray | None = field(default=None, kw_only=True)
    """[N] int32, as in the column `support_sizes`; None if no row has one."""
    routes: np.ndarray | None = field(default=None, kw_only=True)
    """[prompt and response tokens of all contexts, W] int16, as in the column `routes`; None if no row has any."""

    @classmethod
    def from_table(cls, table: pa.Table, routes: bool = False) -> "TokenBatch":
        """Read the tokens of generated rows. If each row has one context, the arrays are views of Arrow's buffers.

        Args:
            table: the rows.
            routes: whether to read the column `routes`, for a model that replays experts.

        Raises ValueError as `unfold` does, and for rows with images and several contexts.
        """
        made = TokenBatch(*unfold(table))
        if "images" in table.column_names:
            if not made.are_contexts:
                raise ValueError("rows with images have several contexts, and may have one")
            shown = (tuple(images or ()) for images in table["images"].to_pylist())
            made.images = np.fromiter(shown, dtype=object, count=len(table))
        if "support_sizes" in table.column_names and table["support_sizes"].null_count < len(table):
            made.support_ids, made.support_sizes = _supports(table, made)
        if routes and "routes" in table.column_names and table["routes"].null_count < len(table):
            made.routes = _routes(table, made)
        return made

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int] | np.ndarray],
        responses: Sequence[Sequence[int] | np.ndarray] | None = None,
        images: Sequence[Sequence[bytes]] | None = None,
    ) -> "TokenBatch":
        """Join rows of one context each.

        Args:
            prompts: token ids of each prompt.
            responses: token ids of each response; None without responses.
            images: encoded images of each row, in order; None for text.
        """
        read, answered = _joined(prompts), _joined([()] * len(prompts) if responses is None else responses)
        shown = None if images is None else np.fromiter(map(tuple, images), dtype=object, count=len(images))
        return cls(*read, *answered, np.arange(len(prompts) + 1), images=shown)

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
    def token_offsets(self) -> np.ndarray:
        """[C + 1] int64, start of each context in `routes`."""
        return self.prompt_offsets + self.response_offsets

    @property
    def lengths(self) -> list[int]:
        """[C] number of tokens of each context, prompt and response."""
        return (np.diff(self.prompt_offsets) + np.diff(self.response_offsets)).tolist()

    def rows_of(self, contexts: np.ndarray) -> np.ndarray:
        """[K] int64, number of the row that each context belongs to, for context numbers `contexts` [K]."""
        return np.searchsorted(self.context_offsets, contexts, side="right") - 1

    def places(self, tokens: np.ndarray) -> np.ndarray:
        """[K] int64, number of response tokens before each of the tokens `tokens` [K] in its context."""
        return tokens - self.response_offsets[np.searchsorted(self.response_offsets, tokens, side="right") - 1]

    def supports(self, tokens: np.ndarray) -> Support | None:
        """Return the supports of the tokens `tokens` [K]; None if no row has one."""
        if self.support_sizes is None:
            return None
        assert self.support_ids is not None
        sizes = np.where(self.support_sizes == UNKNOWN, 0, self.support_sizes)
        starts = np.cumsum(np.abs(sizes)) - np.abs(sizes)
        return Support(
            *(self._lists(starts[tokens], counts[tokens]) for counts in (sizes.clip(min=0), (-sizes).clip(min=0)))
        )

    def _lists(self, starts: np.ndarray, counts: np.ndarray) -> TokenLists:
        assert self.support_ids is not None
        ids = self.support_ids[ranges(starts, counts)].astype(np.int64)
        return TokenLists(torch.from_numpy(ids), torch.from_numpy(counts.astype(np.int64)))

    def pack_lengths(self, packs: Sequence[Sequence[int]]) -> list[int]:
        """Return the number of tokens of each pack: one prompt, and the responses of all contexts in the pack.

        Args:
            packs: context numbers of each pack.
        """
        prompts, responses = np.diff(self.prompt_offsets), np.diff(self.response_offsets)
        return [int(prompts[pack[0]] + responses[list(pack)].sum()) for pack in packs]


@dataclass
class TrainBatch(TokenBatch):
    """One rank's rows of an iteration, with the columns that the optimiser update reads."""

    mask: np.ndarray
    """[N] float32, 1 if the policy wrote the token and the row trains."""
    loss_mask: np.ndarray
    """[N] float32, 1 for tokens that count in the loss: `mask`, with 0 for tokens that the off-policy correction
    rejected."""
    rollout_log_probs: np.ndarray
    """[N] float32, log-probs of the engine."""
    old_log_probs: np.ndarray
    """[N] float32, log-probs in the denominator of the probability ratio: the engine's, or, with
    `actor.old_log_probs=recompute`, the trainer's after the actor has computed them."""
    advantages: np.ndarray
    """[N] float32, advantage of each token."""
    returns: np.ndarray
    """[N] float32, target of the critic for each token."""
    ids: np.ndarray
    """[R] uint64, hash of the row's uid and sample number."""
    groups: np.ndarray
    """[R] uint64, hash of the row's uid. The samples of one prompt have the same uid."""
    ref_log_probs: np.ndarray | None = None
    """[N] float32, log-probs of the reference policy; None without one."""
    teacher_top_ids: np.ndarray | None = None
    """[N, K] int32, the teacher's most likely tokens; None without a distillation loss."""
    teacher_top_log_probs: np.ndarray | None = None
    """[N, K] float32, the teacher's log-probs of them; None without a distillation loss."""
    values: np.ndarray | None = None
    """[N] float32, the critic's values from which the advantages were computed; None without a critic."""
    weights: np.ndarray | None = None
    """[N] float32, importance weights of the off-policy correction, set by the actor."""
    token_mask: np.ndarray | None = None
    """[N] bool, true for tokens that the `token_mask_fn` of the policy loss chose, set by the actor."""
    pair_margin: np.ndarray | None = None
    """[N] float32, margin of the pair that the token belongs to (`LossInput.pair_margin`), set by the actor for losses
    that compare pairs."""

    @classmethod
    def from_table(cls, table: pa.Table, routes: bool = True) -> "TrainBatch":
        """Read the columns of a table of finished rows. Arguments are as in `TokenBatch.from_table`.

        Raises:
            ValueError: as `unfold`; a list column of a row has another length than `response_ids`; or the advantage of
                a trained token is not finite.
        """
        tokens = TokenBatch.from_table(table, routes)
        offsets = tokens.row_offsets
        optional = [name for name in ("ref_log_probs", "values") if name in table.column_names]
        columns = {
            name: per_token(table, name, offsets).astype(np.float32)
            for name in ("response_mask", "rollout_log_probs", "advantages", "returns", *optional)
        }
        for name in ("teacher_top_ids", "teacher_top_log_probs"):
            if name in table.column_names:
                columns[name] = _per_token_lists(table, name, offsets)
                optional.append(name)
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
        """Join the rows of all parts, in order, with all their columns."""
        joined: dict[str, Any] = {}
        if any(part.support_sizes is not None for part in parts):
            parts = [part.with_supports() for part in parts]
        routed = next((part.routes for part in parts if part.routes is not None), None)
        if routed is not None:
            parts = [part.with_routes(routed.shape[1]) for part in parts]
        for name in vars(parts[0]):
            values = [getattr(part, name) for part in parts]
            if name.endswith("_offsets"):
                # Each part's offsets begin at 0.
                ends = np.cumsum([offsets[-1] for offsets in values])
                shifted = [offsets[1:] + end - offsets[-1] for offsets, end in zip(values, ends, strict=True)]
                joined[name] = np.concatenate([[0], *shifted])
            elif values[0] is not None and values[0].ndim == 2:
                # A part without tokens does not show how many entries each token has.
                joined[name] = np.concatenate([each for each in values if len(each)] or values[:1])
            else:
                joined[name] = None if values[0] is None else np.concatenate(values)
        return cls(**joined)

    def with_supports(self) -> Self:
        """Return these rows with the columns of supports, which say that all tokens had the whole vocabulary if they
        were None."""
        if self.support_sizes is not None:
            return self
        return replace(self, support_ids=np.empty(0, np.int32), support_sizes=np.zeros(len(self.mask), np.int32))

    def with_routes(self, width: int) -> Self:
        """Return these rows with the column of routes, `width` for each token, all unknown if they were None."""
        if self.routes is not None:
            return self
        return replace(self, routes=np.full((int(self.token_offsets[-1]), width), UNROUTED, np.int16))

    def mask_counts(self, index: list[int]) -> tuple[int, int]:
        """Return two numbers: of tokens in the rows `index` that count in the loss, and of rows with such a token."""
        per_row = self._count(self.loss_mask > 0)[index]
        return int(per_row.sum()), int((per_row > 0).sum())

    def trained_tokens(self, index: list[int]) -> np.ndarray:
        """[M] indices, into arrays of length N, of the tokens in the rows `index` that count in the loss, row after
        row."""
        offsets = self.row_offsets
        starts = offsets[index]
        tokens = ranges(starts, offsets[np.asarray(index, dtype=np.int64) + 1] - starts)
        return tokens[self.loss_mask[tokens] > 0]

    def random_keys(self, index: list[int], seed: int, step: int) -> np.ndarray:
        """[M] uniform random numbers in [0, 1), one for each of `trained_tokens(index)`.

        They depend only on the seed, the step, the row's id and the token's position in the row's response.
        """
        drawn, offsets = [np.empty(0)], self.row_offsets
        for row in index:
            trained = self.loss_mask[offsets[row] : offsets[row + 1]] > 0
            drawn.append(np.random.default_rng([seed, step, self.ids[row]]).random(len(trained))[trained])
        return np.concatenate(drawn)

    def with_advantages(self, index: list[int]) -> list[int]:
        """Return the rows of `index` with at least one token that counts in the loss and has an advantage other than
        0."""
        per_row = self._count((self.loss_mask > 0) & (self.advantages != 0))
        return [row for row in index if per_row[row]]

    def pairs(self, index: list[int]) -> np.ndarray:
        """[P, 2] int64, pairs of row numbers: the rows of a group with advantage above 0 and below 0, in this order.

        Groups without both have no pair. The sign of a row is the sign of its first advantage that is not 0, among
        tokens that count in the loss.

        Args:
            index: numbers of the rows that may be in pairs.
        """
        signs = np.sign(self.advantages) * (self.loss_mask > 0)
        found: dict[int, list[int | None]] = {}
        for row in self.with_advantages(index):
            of_row = signs[self.row_offsets[row] : self.row_offsets[row + 1]]
            found.setdefault(int(self.groups[row]), [None, None])[int(of_row[of_row != 0][0] < 0)] = row
        return np.array([pair for pair in found.values() if None not in pair], dtype=np.int64).reshape(-1, 2)

    def _count(self, flags: np.ndarray) -> np.ndarray:
        """[R] number of true entries of `flags` [N] in each row."""
        totals = np.concatenate([[0], np.cumsum(flags)])
        return np.diff(totals[self.row_offsets])


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[sum(counts)] the integers of all ranges `start, ..., start + count - 1`, range after range.

    Args:
        starts: [K] first integer of each range.
        counts: [K] number of integers in each range.
    """
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)


def _supports(table: pa.Table, rows: TokenBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return the columns `support` [M] and `support_sizes` [N] of rows, in which rows without supports are null.

    Raises ValueError if a row has no size for each token, or not as many ids as its sizes say, or a support lacks the
    sampled token.
    """
    starts, responses = rows.row_offsets, rows.response_ids
    ids, sizes = [np.empty(0, np.int32)], np.zeros(len(responses), np.int32)
    columns = zip(table["support"], table["support_sizes"], strict=True)
    for row, (support, found) in enumerate(columns):
        if not found.is_valid:
            continue
        tokens, own = slice(starts[row], starts[row + 1]), found.values.to_numpy(zero_copy_only=False)
        listed = support.values.to_numpy(zero_copy_only=False) if support.is_valid else ids[0]
        counts = np.where(own == UNKNOWN, 0, np.abs(own))
        length = starts[row + 1] - starts[row]
        if len(own) != length or counts.sum() != len(listed):
            raise ValueError(
                f"row {row} (uid {_uid(table, row)}) has {len(own)} entries in 'support_sizes' for {length} response "
                f"tokens, and {len(listed)} ids in 'support' for {counts.sum()} that they name"
            )
        among = listed == np.repeat(responses[tokens], counts)
        holds = np.bincount(np.repeat(np.arange(length), counts), among, length) > 0
        wrong = np.flatnonzero(((own > 0) & ~holds) | ((own < 0) & (own != UNKNOWN) & holds))
        if len(wrong):
            raise ValueError(
                f"row {row} (uid {_uid(table, row)}) has token {wrong[0]} of its response, "
                f"{responses[tokens][wrong[0]]}, outside of the support that the column 'support' gives it"
            )
        ids.append(listed.astype(np.int32))
        sizes[tokens] = own
    return np.concatenate(ids), sizes


def _routes(table: pa.Table, rows: TokenBatch) -> np.ndarray:
    """Return the column `routes` [tokens, W] of rows, unknown in rows in which it is null.

    Raises ValueError if a row does not have as many entries for each of its tokens as the other rows.
    """
    starts, width, made = rows.token_offsets[rows.context_offsets], 0, np.empty((0, 0), np.int16)
    for row, found in enumerate(table["routes"]):
        if not found.is_valid:
            continue
        own, tokens = found.values.to_numpy(zero_copy_only=False), int(starts[row + 1] - starts[row])
        if not width:
            width = len(own) // max(tokens, 1)
            made = np.full((int(starts[-1]), width), UNROUTED, np.int16)
        if len(own) != tokens * width:
            raise ValueError(
                f"row {row} (uid {_uid(table, row)}) has {len(own)} entries in 'routes' for {tokens} tokens; there "
                f"must be {width} for each token of prompt and response, as in the rows before it"
            )
        made[starts[row] : starts[row + 1]] = own.reshape(tokens, width)
    return made


def _per_token_lists(table: pa.Table, name: str, offsets: np.ndarray) -> np.ndarray:
    """[N, K] the column `name`, which has K entries for each response token. Raises ValueError if it has not."""
    values, found = flat(table, name)
    tokens = int(offsets[-1])
    width = len(values) // tokens if tokens else 0
    if not np.array_equal(found, offsets * width):
        raise ValueError(f"column {name!r} does not have the same number of entries for each response token")
    return values.reshape(tokens, width)


def _joined(rows: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of all rows end to end, int32, and the start of each row, with the end of the last."""
    ends = np.cumsum([0, *map(len, rows)])
    return np.concatenate([np.empty(0, np.int32), *(np.asarray(row, np.int32) for row in rows)]), ends


def _hashes(names: Iterable[str]) -> np.ndarray:
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), dtype="<u8")


def _uid(table: pa.Table, row: int) -> str:
    return str(table["uid"][row].as_py())
