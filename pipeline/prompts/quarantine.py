"""Record rows that cannot be used in `RUN/quarantine`, and end the run if they are more than `data.max_bad_rows`.

Each bad row becomes a parquet file of one row (`file`, `row_group`, `row`, `reason`, `content` as JSON). The name of
this file is a hash of the row's position, so a row that is read again, in a later epoch or after a restart, counts
once.
"""

import hashlib
import json
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.prompts.parquet import Place
from pipeline.storage.filesystem import filesystem_of


class Quarantine:
    """Record of the rows of a run that cannot be used."""

    def __init__(self, limit: int, run_dir: str | None = None) -> None:
        """Read the names of bad rows that the run has recorded before.

        Args:
            limit: maximum number of bad rows; with 0 the first one ends the run.
            run_dir: folder or URL of the run; bad rows recorded there count too. None: bad rows are counted, but not
                written.

        Raises:
            OSError: the folder cannot be read.
        """
        self.limit = limit
        self._folder: str | None = None
        self._names: set[str] = set()
        if run_dir is not None:
            self._filesystem, root = filesystem_of(run_dir)
            self._folder = f"{root}/quarantine"
            listed = self._filesystem.get_file_info(pafs.FileSelector(self._folder, allow_not_found=True))
            self._names = {info.base_name for info in listed if info.extension == "parquet"}

    @property
    def count(self) -> int:
        """Number of distinct bad rows so far."""
        return len(self._names)

    def add(self, place: Place, row: Any, error: ValueError) -> None:
        """Record a bad row.

        Args:
            place: position of the row.
            row: content of the row, as read.
            error: reason why the row cannot be used.

        Raises:
            ValueError: there are now more bad rows than `limit`.
            OSError: the row cannot be written.
        """
        reason = f"{place}: {error}"
        if self.limit == 0:
            raise ValueError(reason) from error
        name = hashlib.blake2b(repr(tuple(place)).encode(), digest_size=12).hexdigest() + ".parquet"
        if name not in self._names:
            self._names.add(name)
            # Values that JSON cannot hold may be the reason why the row is bad.
            self._write(name, {**place._asdict(), "reason": reason, "content": json.dumps(row, default=_shown)})
        if self.count > self.limit:
            listed = f"they are listed in {self._folder}" if self._folder else "the run has not begun"
            raise ValueError(
                f"data.max_bad_rows={self.limit}: {self.count} rows cannot be used, {listed}. The last one: {reason}. "
                "Correct the files and delete that list, or raise data.max_bad_rows."
            ) from error

    def _write(self, name: str, values: dict[str, Any]) -> None:
        if self._folder is None:
            return
        self._filesystem.create_dir(self._folder, recursive=True)
        aside = f"{self._folder}/.{name}.tmp"
        pq.write_table(pa.Table.from_pylist([values]), aside, filesystem=self._filesystem)
        self._filesystem.move(aside, f"{self._folder}/{name}")


def _shown(value: Any) -> str:
    """Return the text of a value that JSON cannot hold; images are not repeated."""
    return f"{len(value)} bytes" if isinstance(value, bytes) and len(value) > 80 else repr(value)
