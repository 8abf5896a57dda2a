"""Rows that cannot be used: set aside in `RUN/quarantine`, and counted, up to `data.max_bad_rows`.

Each is one small parquet file of one row (`file`, `row_group`, `row`, `reason`, `content` as JSON), named after
its place: a row that is met again, in a later epoch or after a restart, is counted once.
"""

import hashlib
import json
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.prompts.prompt_file import Place

FOLDER = "quarantine"
SCHEMA = pa.schema(
    [
        ("file", pa.string()),
        ("row_group", pa.int64()),
        ("row", pa.int64()),
        ("reason", pa.string()),
        ("content", pa.string()),
    ]
)


class Quarantine:
    """The bad rows of a run."""

    def __init__(self, limit: int, run_dir: str | None = None) -> None:
        """
        Args:
            limit: most bad rows there may be; with 0 the first one ends the run.
            run_dir: the run's folder or URL, whose earlier bad rows count too; without one, rows are only counted.

        Raises:
            ValueError: the limit is negative.
            OSError: the folder cannot be read.
        """
        if limit < 0:
            raise ValueError(f"data.max_bad_rows is {limit}; it must be at least 0")
        self.limit = limit
        self._filesystem, self._folder = pafs.LocalFileSystem(), ""
        if run_dir is not None:
            if "://" in run_dir:
                self._filesystem, run_dir = pafs.FileSystem.from_uri(run_dir)
            self._folder = f"{run_dir.rstrip('/')}/{FOLDER}"
        self._names = self._listed() if self._folder else set()

    @property
    def count(self) -> int:
        """Different rows set aside so far."""
        return len(self._names)

    def add(self, place: Place, row: Any, error: ValueError) -> None:
        """Set a row aside.

        Args:
            place: where it stands.
            row: it, as read.
            error: what is wrong with it.

        Raises:
            ValueError: it is one too many. With a limit of 0 this is `error` itself.
            OSError: it cannot be written.
        """
        if self.limit == 0:
            raise error
        name = hashlib.blake2b(repr(tuple(place)).encode(), digest_size=12).hexdigest() + ".parquet"
        if name not in self._names:
            self._names.add(name)
            if self._folder:
                self._write(name, place, row, error)
        if self.count > self.limit:
            listed = f"they are listed in {self._folder}" if self._folder else "the run has not begun"
            raise ValueError(
                f"data.max_bad_rows={self.limit}: {self.count} rows cannot be used, {listed}. The last one: {error}. "
                "Correct the files and delete that list, or raise data.max_bad_rows."
            ) from error

    def _listed(self) -> set[str]:
        selector = pafs.FileSelector(self._folder, allow_not_found=True)
        return {info.base_name for info in self._filesystem.get_file_info(selector) if info.extension == "parquet"}

    def _write(self, name: str, place: Place, row: Any, error: ValueError) -> None:
        values = {
            **place._asdict(),
            "reason": str(error),
            # The row may be bad because it does not fit JSON.
            "content": json.dumps(row, default=repr),
        }
        table = pa.Table.from_pylist([values], SCHEMA)
        self._filesystem.create_dir(self._folder, recursive=True)
        aside = f"{self._folder}/.{name}.tmp"
        pq.write_table(table, aside, filesystem=self._filesystem)
        self._filesystem.move(aside, f"{self._folder}/{name}")
