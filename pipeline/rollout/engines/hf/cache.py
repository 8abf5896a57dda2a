"""The KV cache of an engine of `transformers`: one left-padded batch whose memory is allocated ahead.

    row 0     . . . p p p p t t t
    row 1     . p p p p p p t t t        the newest token of each row is in the last column
    row 2     . . . . . . . p p t

Each step writes one column in place. Memory grows by `AHEAD` columns, so that a token costs no copy of all earlier
ones. The last row moves into the place of a row that ends.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from pipeline.models.batch import TokenBatch
from pipeline.models.policy import Policy

AHEAD = 64
"""Columns that are allocated at a time."""


class CacheWindow:
    """Part of the memory that holds the rows: rows `0:rows` and columns `start:end`."""

    def __init__(self, room_rows: int, room_columns: int) -> None:
        self.rows = self.start = self.end = 0
        self.room_rows, self.room_columns = room_rows, room_columns


class WindowLayer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, columns, dimensions] each."""

    is_sliding = False

    def __init__(self, window: CacheWindow) -> None:
        super().__init__()
        self.window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the memory."""
        self.keys, self.values = (self._room(states) for states in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new columns, and return the window with the new columns."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        end = window.end + key_states.shape[2]
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        keys[: window.rows, :, window.end : end] = key_states
        values[: window.rows, :, window.end : end] = value_states
        return keys[: window.rows, :, window.start : end], values[: window.rows, :, window.start : end]

    def grow(self) -> None:
        """Move the window's content to the beginning of new memory, of the size that the window now has."""
        window = self.window
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._room(old)
            new[: window.rows, :, : window.end - window.start] = old[: window.rows, :, window.start : window.end]
            setattr(self, name, new)

    def get_seq_length(self) -> int:
        """Return the number of columns."""
        return self.window.end - self.window.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns after an update, and the first one's index."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the number of columns has no limit."""
        return -1

    def _room(self, like: Tensor) -> Tensor:
        # Zeros: attention multiplies padding by 0, and what is not a number would stay so.
        rows, columns = self.window.room_rows, self.window.room_columns
        return like.new_zeros((rows, like.shape[1], columns, like.shape[3]))


class WindowCache:
    """The KV of the running rows.

    Args:
        device: device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._window = CacheWindow(0, 0)
        self._cache: Any = None
        self._first: list[int] = []
        """Column of each row's first token."""
        self._ahead: list[int] = []
        """Position of each row's next token, less its number of tokens; not 0 if a family counts an image's features
        in another way."""

    def __len__(self) -> int:
        return len(self._first)

    @property
    def cell_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        held = (part for layer in self._cache.layers for part in (layer.keys, layer.values))
        return sum(part.shape[1] * part.shape[3] * part.itemsize for part in held)

    def prefill(self, policy: Policy, rows: TokenBatch) -> tuple[Tensor, "WindowCache"]:
        """Let the policy read whole rows; returns logits [R, V] after the last token of each, and a cache that holds
        them."""
        made, longest = WindowCache(self._device), max(rows.lengths)
        made._window = CacheWindow(len(rows), longest)
        made._window.rows = len(rows)
        made._cache = Cache(layer_class_to_replicate=partial(WindowLayer, made._window))  # type: ignore[arg-type]
        made._first, made._ahead = [longest - length for length in rows.lengths], [0] * len(rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        for row, first in enumerate(made._first):
            middle = first + int(rows.prompt_offsets[row + 1] - rows.prompt_offsets[row])
            ids[row, first:middle] = torch.from_numpy(rows.prompt_ids[slice(*rows.prompt_offsets[row : row + 2])])
            ids[row, middle:] = torch.from_numpy(rows.response_ids[slice(*rows.response_offsets[row : row + 2])])
        positions = made._positions(longest)
        given: dict[str, Any] | None = None
        if policy.image_reader is not None and rows.images is not None:
            numbers = np.arange(len(rows))
            prompts, fed = np.diff(rows.prompt_offsets), np.diff(rows.response_offsets)
            starts = numbers * longest + np.array(made._first)
            where = starts, starts + prompts, fed, positions.view(1, -1)
            images, flat = policy.image_reader.place(rows, numbers[:, None].tolist(), *where)
            positions = flat.view(*flat.shape[:-2], *ids.shape)
            last = flat.view(-1, *ids.shape).amax((0, 2))
            made._ahead = (last + 1 - torch.from_numpy(prompts + fed)).tolist()
            given = policy.image_reader.embed(ids.to(self._device), images.to(self._device), sharded=False)
        return made._pass(policy, given or {"input_ids": ids.to(self._device)}, positions), made

    def decode(self, policy: Policy, tokens: Sequence[int]) -> Tensor:
        """Let the policy read one more token of each row; returns logits [R, V]."""
        self._make_room(len(self), 1)
        return self._pass(policy, {"input_ids": torch.tensor(tokens, device=self._device)[:, None]}, self._positions(1))

    def join(self, other: "WindowCache", index: Sequence[int]) -> None:
        """Add rows of another cache.

        Args:
            other: a cache from `prefill`.
            index: rows of `other`; a row may come several times.
        """
        if not index:
            return
        if not self._first:
            self.clear()
        old, columns, window = len(self), other._window.end, self._window
        self._make_room(old + len(index), max(0, columns - (window.end - window.start)))
        if self._cache is None:
            layers = [WindowLayer(window) for _ in other._cache.layers]
            for own, new in zip(layers, other._cache.layers, strict=True):
                own.lazy_initialization(new.keys, new.values)
            self._cache = Cache(layers=list(layers))
        shift = columns - (window.end - window.start)
        if shift > 0:
            # The new rows are longer than all others, which move to the right.
            self._move_right(shift)
        window.rows = old + len(index)
        chosen, place = torch.tensor(index, device=self._device), window.end - columns
        for own, new in zip(self._cache.layers, other._cache.layers, strict=True):
            for name in ("keys", "values"):
                rows = getattr(new, name)[:, :, :columns].index_select(0, chosen)
                getattr(own, name)[old : window.rows, :, place : window.end] = rows
        self._first += [place + other._first[number] for number in index]
        self._ahead += [other._ahead[number] for number in index]

    def keep(self, index: Sequence[int]) -> list[int]:
        """Remove all rows but those in `index`; returns the old numbers of the rows in their new order."""
        kept, count = set(index), len(index)
        if not count:
            self.clear()
            return []
        holes = [number for number in range(count) if number not in kept]
        moved = [number for number in range(count, len(self)) if number in kept]
        order = list(range(count))
        for hole, number in zip(holes, moved, strict=True):
            order[hole] = number
        window = self._window
        if holes:
            columns = slice(window.start, window.end)
            for layer in self._cache.layers:
                for held in (layer.keys, layer.values):
                    held[holes, :, columns] = held[moved, :, columns]
        self._first, self._ahead = ([held[number] for number in order] for held in (self._first, self._ahead))
        window.rows, window.start = count, min(self._first)
        return order

    def clear(self) -> None:
        """Drop all rows and free their memory."""
        self._window, self._cache, self._first, self._ahead = CacheWindow(0, 0), None, [], []

    def _positions(self, columns: int) -> Tensor:
        """[R, C] int64 on the CPU, positions of the tokens in the next `columns` columns; 0 for padding."""
        end, first = self._window.end, torch.tensor(self._first)[:, None]
        counted = torch.arange(end, end + columns)[None] - first
        return counted.clamp_(min=0) + torch.tensor(self._ahead)[:, None]

    def _pass(self, policy: Policy, given: dict[str, Any], positions: Tensor) -> Tensor:
        """Run the policy on new columns; returns logits [R, V] of the last one.

        Args:
            policy: the policy.
            given: tokens of the new columns, or their embeddings, as arguments of the decoder.
            positions: [R, C] int64, or [3, R, C] for positions with three axes.
        """
        window = self._window
        end = window.end + positions.shape[-1]
        more: dict[str, Any] = {}
        if max(self._first) > window.start:
            first = torch.tensor(self._first, device=self._device)[:, None]
            more["attention_mask"] = torch.arange(window.start, end, device=self._device)[None] >= first
        output = policy.decoder(
            **given, position_ids=positions.to(self._device), past_key_values=self._cache, use_cache=True, **more
        )
        window.end = end
        return policy.logits(output.last_hidden_state[:, -1])

    def _make_room(self, rows: int, columns: int) -> None:
        """Allocate memory for `rows` rows, and for `columns` columns after the window."""
        window = self._window
        if rows <= window.room_rows and window.end + columns <= window.room_columns:
            return
        needed = window.end - window.start + columns
        # Rows that have ended need no room.
        window.room_rows = rows
        window.room_columns = -(-needed // AHEAD) * AHEAD
        if self._cache is not None:
            for layer in self._cache.layers:
                layer.grow()
        self._first = [first - window.start for first in self._first]
        window.start, window.end = 0, window.end - window.start

    def _move_right(self, shift: int) -> None:
        window = self._window
        old, new = slice(window.start, window.end), slice(window.start + shift, window.end + shift)
        for layer in self._cache.layers:
            for held in (layer.keys, layer.values):
                held[: len(self), :, new] = held[: len(self), :, old].clone()
        self._first = [first + shift for first in self._first]
        window.end += shift
