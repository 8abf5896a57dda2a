"""Shuffle the rows of prompt files: an endless and repeatable order, which is read one window at a time.

The order of an epoch depends only on (row counts of the files, seed, epoch). Row groups are permuted and divided into
windows of at most `window_rows` rows, and the rows of each window are permuted. A row group larger than half a window
is first cut into equal slices. So a window always mixes several parts of the data, and memory is bounded for any layout
of the files. Windows before a position are skipped without being read.
"""

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.cells import values
from pipeline.prompts.parquet import Place, PromptFile, Slice


class Unit(NamedTuple):
    """Rows that are permuted together: a row group, or a slice of a large one."""

    file: int
    """Index of the file in the list of files."""
    part: Slice


class Window(NamedTuple):
    """Units that are in memory together; their rows are mixed."""

    number: int
    start: int
    """Number of rows before the window in the order of the epoch."""
    units: list[Unit]

    @property
    def rows(self) -> int:
        return sum(unit.part.rows for unit in self.units)


class Row(NamedTuple):
    """A row, at its position in the order, not yet decoded."""

    epoch: int
    offset: int
    """Number of rows before this one in the order of the epoch."""
    place: Place
    prompt_index: int
    """Number of the row over all files, from 0."""
    encoded: pa.RecordBatch
    """An Arrow batch with only this row."""

    def values(self) -> dict[str, Any]:
        """Decode the columns of the row. Raises ValueError if they cannot be decoded."""
        return next(values(self.encoded))


def units(files: list[PromptFile], window_rows: int, limit: int) -> list[Unit]:
    """List the units of `files` in file order: whole row groups, or equal slices of those larger than half a window.

    Args:
        files: the prompt files.
        window_rows: maximum number of rows in a window.
        limit: number of rows to use, from the first on; -1: all.
    """
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


class ShuffledDataset:
    """Rows of files in an endless order."""

    def __init__(
        self,
        files: list[PromptFile],
        units: list[Unit],
        window_rows: int,
        seed: Sequence[int],
        shuffle: bool,
        columns: list[str],
    ) -> None:
        """Store the parts.

        Args:
            files: the files, which are opened when a window is read.
            units: the rows to use.
            window_rows: maximum number of rows in a window, and so in memory.
            seed: determines the order, together with the epoch.
            shuffle: False keeps the order of the files.
            columns: names of the columns to read.
        """
        self.files, self.units, self.window_rows = files, units, window_rows
        self.shuffle, self.columns = shuffle, columns
        self.rows = sum(unit.part.rows for unit in units)
        self._seed = [part % 2**64 for part in seed]
        self._first_index = [0, *itertools.accumulate(file.rows for file in files)]

    def walk(self, epoch: int, offset: int, epochs: int | None) -> Iterator[Row]:
        """Yield rows from the position (`epoch`, `offset`) on, up to the beginning of epoch `epochs` (None: no end).

        Errors are the same as for `PromptFile.read`.
        """
        for current in itertools.count(epoch):
            if epochs is not None and current >= epochs:
                return
            for window in self.windows(current):
                if window.start + window.rows > offset:
                    yield from self._rows(current, window, max(offset - window.start, 0))
            offset = 0

    def windows(self, epoch: int) -> list[Window]:
        """Return the windows of an epoch in order. No file is read."""
        units = self.units
        if self.shuffle:
            units = [units[i] for i in self._random(epoch).permutation(len(units))]
        windows: list[Window] = []
        held: list[Unit] = []
        start, rows = 0, 0
        for unit in units:
            if held and rows + unit.part.rows > self.window_rows:
                windows.append(Window(len(windows), start, held))
                start, rows, held = start + rows, 0, []
            held.append(unit)
            rows += unit.part.rows
        return [*windows, Window(len(windows), start, held)]

    def _random(self, *place: int) -> np.random.Generator:
        # `spawn_key` keeps (epoch,) and (epoch, 0) apart; plain entropy lists are padded with zeros and do not.
        return np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=place))

    def _rows(self, epoch: int, window: Window, skip: int) -> Iterator[Row]:
        """Yield the rows of a window, without the first `skip`. The window is in memory until all rows are taken."""
        parts: list[tuple[int, Slice, pa.RecordBatch]] = []
        for file, own in itertools.groupby(sorted(window.units), key=lambda unit: unit.file):
            parts += [(file, *read) for read in self.files[file].read([unit.part for unit in own], self.columns)]
        firsts = [0, *itertools.accumulate(len(batch) for _, _, batch in parts)][:-1]
        order: Any = range(window.rows)
        if self.shuffle:
            order = self._random(epoch, window.number).permutation(window.rows)
        for number in range(skip, window.rows):
            row = int(order[number])
            part = bisect.bisect_right(firsts, row) - 1
            file, where, batch = parts[part]
            local = row - firsts[part]
            place = self.files[file].place(where.row_group, where.start + local)
            index = self._first_index[file] + place.row
            yield Row(epoch, window.start + number, place, index, batch.slice(local, 1))


BLOCK = 1024


def uniform_at(seed: tuple[int, ...], *place: int) -> float:
    """Return the random number at the position `place` of a stream with the seed `seed`: uniform in [0, 1)."""
    *group, last = place
    return float(_uniform_block(seed, (*group, last // BLOCK))[last % BLOCK])


@functools.lru_cache(maxsize=64)
def _uniform_block(seed: tuple[int, ...], block: tuple[int, ...]) -> np.ndarray:
    sequence = np.random.SeedSequence([part % 2**64 for part in seed], spawn_key=block)
    return np.random.default_rng(sequence).random(BLOCK)
