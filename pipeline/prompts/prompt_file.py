"""A file of prompts, whatever its format: rows in row groups, read a batch at a time, each with its place.

The order of any number of rows is planned from `row_groups` alone; what a format must add is how its row groups are
found when it is opened (`columnar.py`, `json_rows.py`), read, and turned into rows.
"""

import functools
import itertools
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs


class Place(NamedTuple):
    """Where a row stands, for error messages."""

    file: str
    row_group: int
    row: int
    """Number of the row in its file, from 0."""
    line: int | None = None
    """Number of its line, from 1, where rows are lines."""

    def __str__(self) -> str:
        if self.line is not None:
            return f"{self.file}, line {self.line} (row {self.row}, row group {self.row_group})"
        return f"{self.file}, row {self.row} (row group {self.row_group})"


class Slice(NamedTuple):
    """Rows `start` to `stop` (not included) of one row group."""

    row_group: int
    start: int
    stop: int


@dataclass(frozen=True)
class PromptFile(ABC):
    """One file of prompts that has been opened once, and whose columns have been checked where it declares any."""

    name: str
    """Path or URL for people."""

    key: str
    """Config key that named the file, for messages."""

    filesystem: pyarrow.fs.FileSystem
    """Opens `path`; can be pickled."""

    path: str
    """Path inside `filesystem`."""

    row_groups: tuple[int, ...]
    """Rows of each row group."""

    @property
    def rows(self) -> int:
        return sum(self.row_groups)

    def place(self, row_group: int, row: int) -> Place:
        """Where row `row` of a row group stands."""
        return Place(self.name, row_group, self._first_rows[row_group] + row)

    def read(self, slices: list[Slice], columns: list[str]) -> Iterator[tuple[Slice, pa.RecordBatch]]:
        """Rows of the slices, by place in the file, in batches of bounded size; each with where it stands.

        A slice inside a row group costs decoding the row group up to it. What a batch looks like is the format's own
        business: `row` and `data_sources` understand it.

        Args:
            slices: which rows.
            columns: those that are needed, as `name` or `name.field`; those that the file lacks are left out.

        Raises:
            OSError: the file has gone, is damaged, or is not the one that was opened at the start.
        """
        row_group = min(slices).row_group
        try:
            with self._opened() as reader:
                for row_group, wanted in itertools.groupby(sorted(slices), key=lambda s: s.row_group):
                    parts = list(wanted)
                    end = max(part.stop for part in parts)
                    row = 0
                    for batch in self._batches(reader, row_group, columns):
                        for part in parts:
                            start, stop = max(part.start, row), min(part.stop, row + len(batch))
                            if start < stop:
                                yield Slice(row_group, start, stop), batch.slice(start - row, stop - start)
                        row += len(batch)
                        if row >= end:
                            break
        # Any filesystem package may stand behind the handle, each with its own exceptions.
        except Exception as error:
            raise OSError(
                f"{self.key}: {self.name}, row group {row_group}: could not be read, though it was when the run "
                f"started: {reason(error)}. Put the file back as it was and start the same command again."
            ) from error

    @abstractmethod
    def row(self, batch: pa.RecordBatch, number: int, place: Place) -> dict[str, Any]:
        """Row `number` of a batch that `read` gave; `place` is where it stands, for messages.

        Raises:
            ValueError: it is no row.
        """

    @abstractmethod
    def data_sources(self, batch: pa.RecordBatch) -> pa.Array:
        """The `data_source` of each row of a batch that `read` gave; null where there is none."""

    @abstractmethod
    def _opened(self) -> AbstractContextManager[Any]:
        """What `_batches` reads from.

        Raises:
            OSError: the file is not the one that was opened at the start.
        """

    @abstractmethod
    def _batches(self, reader: Any, row_group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The rows of one row group, in order; called with rising row groups."""

    @functools.cached_property
    def _first_rows(self) -> list[int]:
        return [0, *itertools.accumulate(self.row_groups)]


def reason(error: Exception) -> str:
    """What an exception of another library says, on one line and without its endless tail."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...").rstrip(". ")
