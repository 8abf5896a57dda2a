"""Write parquet files in verl's format. Files have temporary names until all of them are complete."""

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
"""Number of rows per row group, which is held in memory. The prompt source of a run shuffles row groups."""
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
IMAGES = pa.field("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())])))
"""Column of encoded images, in the format of verl's files."""
SFT = pa.schema([("messages", MESSAGES)])
MARK = {b"written_by": b"slipstream prepare"}
"""Parquet metadata that marks a file as written here, so that it may be replaced."""

Fields = list[tuple[str, pa.DataType]]


def prompt_schema(reward_model: Fields, extra_info: Fields) -> pa.Schema:
    """Return the schema of a prompt file.

    Args:
        reward_model: fields of the column `reward_model` after `style`.
        extra_info: fields of the column `extra_info` after `split` and `index`.
    """
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
    """Yield a temporary folder for new files. If the block does not fail, they are moved to `folder` at its end.

    After an error, or Ctrl-C, files in `folder` are unchanged. Files of other programs are never replaced.

    Raises:
        ValueError: `folder` has a file with the name of a new one that was not written by `writer`.
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
    """Return a parquet writer for the file `path`, marked as one that may be replaced later."""
    return pq.ParquetWriter(path, schema.with_metadata({**(schema.metadata or {}), **MARK}), compression="zstd")


def _is_ours(path: Path) -> bool:
    try:
        return MARK.items() <= (pq.read_schema(path).metadata or {}).items()
    except (OSError, pa.ArrowException):
        return False


def write(path: Path, schema: pa.Schema, rows: Iterable[dict[str, Any] | None]) -> tuple[int, int]:
    """Write the rows that are not None. Returns (number of rows written, number of Nones)."""
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
