"""The order of rows: endless, repeatable, planned from row counts alone, read one window at a time.

1. The order of an epoch follows from (files, seed, epoch). Row groups are permuted and laid into windows of at most
   `window_rows` rows, and each window is permuted. A row group larger than half a window is cut into equal slices
   first, so a window always mixes several parts of the data and its memory is bounded however the files were written.
2. A position is (epoch, offset), where offset counts the rows of the epoch's order. Windows before it are skipped
   without being read.
3. Rows stay as read until one is taken. One window is held at a time.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.prompts.prompt_file import Place, PromptFile, Slice


class Unit(NamedTuple):
    """Rows that are drawn together: a row group, or a slice of a large one."""

    file: int
    part: Slice

    @property
    def rows(self) -> int:
        return self.part.stop - self.part.start


@dataclass(frozen=True)
class Window:
    """Units that are shuffled together."""

    number: int
    start: int
    """Offset of its first row in the epoch."""
    units: tuple[Unit, ...]

    @property
    def rows(self) -> int:
        return sum(unit.rows for unit in self.units)


class Found(NamedTuple):
    """A row in the order, not yet decoded."""

    epoch: int
    offset: int
    place: Place
    prompt_index: int
    """Number of the row in all files, from 0."""
    file: PromptFile
    batch: pa.RecordBatch
    number: int
    """Of the row in `batch`."""

    def values(self) -> dict[str, Any]:
        """The row.

        Raises:
            ValueError: it is no row.
        """
        return self.batch.slice(self.number, 1).to_pylist()[0]


def units(files: list[PromptFile], window_rows: int, limit: int) -> list[Unit]:
    """Row groups in file order, those above half a window cut into equal slices, up to `limit` rows (-1: all)."""
    most = max(window_rows // 2, 1)
    left = limit if limit >= 0 else sum(file.rows for file in files)
    found = []
    for file, prompt_file in enumerate(files):
        for row_group, there in enumerate(prompt_file.row_groups):
            rows = min(there, left)
            left -= rows
            slices = -(-rows // most)
            for i in range(slices):
                found.append(Unit(file, Slice(row_group, rows * i // slices, rows * (i + 1) // slices)))
    return found


class Order:
    """An endless order of rows. Plain Python: it needs no Ray, and can be pickled."""

    def __init__(
        self,
        files: list[PromptFile],
        units: list[Unit],
        window_rows: int,
        seed: int | Sequence[int],
        shuffle: bool,
        columns: list[str],
    ) -> None:
        """
        Args:
            files: they are not opened before a window is read.
            units: the rows that are in the order.
            window_rows: most rows that are held in memory.
            seed: of the order, together with the epoch.
            shuffle: False keeps the order of the files.
            columns: what is read of each row.
        """
        self.files, self.units, self.window_rows = files, units, window_rows
        self.shuffle, self.columns = shuffle, columns
        self.rows = sum(unit.rows for unit in units)
        self._seed = [part % 2**64 for part in ([seed] if isinstance(seed, int) else seed)]
        self._first = [0, *itertools.accumulate(file.rows for file in files)]
        self._planned: tuple[int, list[Window]] = (-1, [])
        self._held: _Held | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": None}

    def windows(self, epoch: int) -> list[Window]:
        """The windows of an epoch in order, from row counts alone."""
        if self._planned[0] != epoch:
            self._planned = epoch, self._plan(epoch)
        return self._planned[1]

    def walk(self, epoch: int, offset: int, epochs: int | None) -> Iterator[Found]:
        """Rows from a position on, up to the beginning of epoch `epochs` (None: without end).

        Raises:
            OSError: a file has gone, is damaged or has changed since the start.
        """
        for current in itertools.count(epoch):
            if epochs is not None and current >= epochs:
                return
            for window in self.windows(current):
                if window.start + window.rows > offset:
                    yield from self._rows(current, window, max(offset - window.start, 0))
            offset = 0

    def _plan(self, epoch: int) -> list[Window]:
        units = self.units
        if self.shuffle:
            units = [units[i] for i in self._random(epoch).permutation(len(units))]
        windows: list[Window] = []
        held: list[Unit] = []
        start, rows = 0, 0
        for unit in units:
            if held and rows + unit.rows > self.window_rows:
                windows.append(Window(len(windows), start, tuple(held)))
                start, rows, held = start + rows, 0, []
            held.append(unit)
            rows += unit.rows
        return [*windows, Window(len(windows), start, tuple(held))]

    def _random(self, *place: int) -> np.random.Generator:
        seed = self._seed[0] if len(self._seed) == 1 else self._seed
        # `spawn_key` keeps (epoch,) and (epoch, 0) apart; plain entropy lists are padded with zeros and do not.
        return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=place))

    def _rows(self, epoch: int, window: Window, skip: int) -> Iterator[Found]:
        held = self._load(epoch, window)
        for place in range(skip, window.rows):
            row = int(held.order[place])
            number = bisect.bisect_right(held.firsts, row) - 1
            file, part, batch = held.parts[number]
            local = row - held.firsts[number]
            where = self.files[file].place(part.row_group, part.start + local)
            yield Found(
                epoch, window.start + place, where, self._first[file] + where.row, self.files[file], batch, local
            )

    def _load(self, epoch: int, window: Window) -> "_Held":
        """The window's rows as read, in file order; kept for the next one who asks."""
        if self._held is None or self._held.key != (epoch, window.number):
            # Not before the old one has gone: one window is the bound.
            self._held = None
            parts = []
            for file, units in itertools.groupby(sorted(window.units), key=lambda unit: unit.file):
                parts += [(file, *read) for read in self.files[file].read([u.part for u in units], self.columns)]
            firsts = [0, *itertools.accumulate(len(batch) for _, _, batch in parts)][:-1]
            shuffled = self._random(epoch, window.number).permutation(window.rows) if self.shuffle else None
            order = range(window.rows) if shuffled is None else shuffled
            self._held = _Held((epoch, window.number), parts, firsts, order)
        return self._held


class _Held(NamedTuple):
    """A window in memory."""

    key: tuple[int, int]
    parts: list[tuple[int, Slice, pa.RecordBatch]]
    firsts: list[int]
    """Number of each part's first row in the window."""
    order: Any
    """Row of the window at each place."""


class Chances:
    """Repeatable random numbers from 0 up to 1, by place."""

    BLOCK = 1024

    def __init__(self, *seed: int) -> None:
        self._seed = [part % 2**64 for part in seed]
        self._block: tuple[int, ...] = ()
        self._numbers = np.empty(0)

    def __call__(self, *place: int) -> float:
        *group, last = place
        block = (*group, last // self.BLOCK)
        if block != self._block:
            sequence = np.random.SeedSequence(self._seed, spawn_key=block)
            self._block, self._numbers = block, np.random.default_rng(sequence).random(self.BLOCK)
        return float(self._numbers[last % self.BLOCK])
