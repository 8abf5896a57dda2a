"""Parquet in verl's format, written in row groups under temporary names, which are renamed when all files are
complete."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP = 4096
"""Number of rows that are held in memory and written together; the prompt source shuffles within this unit, too."""
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
SFT = pa.schema([("messages", MESSAGES)])
MARK = {b"written_by": b"slipstream prepare"}
"""Metadata of a file that may be replaced."""

Fields = list[tuple[str, pa.DataType]]


def prompt_schema(reward_model: Fields, extra_info: Fields) -> pa.Schema:
    """Make the schema of a prompt file: `reward_model` adds fields after `style`, and `extra_info` after `index`."""
    return pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", MESSAGES),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), *reward_model])),
            ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64()), *extra_info])),
        ]
    )


@contextmanager
def together(folder: Path) -> Iterator[Path]:
    """Make a temporary folder inside `folder`, whose files replace the files in `folder` if nothing fails.

    After an error, or Ctrl-C, older files are untouched. Files of other programs are never replaced.

    Raises:
        ValueError: a file in `folder` has the name of a new one, and `writer` has not made it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as partial:
        yield Path(partial)
        files = sorted(Path(partial).iterdir())
        for file in files:
            if os.path.lexists(folder / file.name) and not _is_ours(folder / file.name):
                raise ValueError(
                    f"{folder / file.name} is there and was not written by this command, so nothing was written; "
                    "choose another --out, or move or remove that file"
                )
        for file in files:
            os.replace(file, folder / file.name)


def writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """Make a writer of a file that a later call may replace."""
    return pq.ParquetWriter(path, schema.with_metadata({**(schema.metadata or {}), **MARK}), compression="zstd")


def _is_ours(path: Path) -> bool:
    try:
        return MARK.items() <= (pq.read_schema(path).metadata or {}).items()
    except (OSError, pa.ArrowException):
        return False


def write(path: Path, schema: pa.Schema, rows: Iterable[dict[str, Any] | None]) -> tuple[int, int]:
    """Write the rows that are not None, with one row group in memory; returns the numbers of rows and of Nones."""
    kept = dropped = 0

    def present() -> Iterator[dict[str, Any]]:
        nonlocal dropped
        for row in rows:
            if row is None:
                dropped += 1
            else:
                yield row

    written = present()
    with writer(path, schema) as file:
        while group := list(islice(written, ROW_GROUP)):
            file.write_table(pa.Table.from_pylist(group, schema=schema))
            kept += len(group)
    return kept, dropped
