"""Parquet in verl's format, written in row groups under temporary names that are renamed once everything is there."""

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
"""Rows that are held in memory and written together; the prompt source shuffles within this unit, too."""
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
SFT = pa.schema([("messages", MESSAGES)])

Fields = list[tuple[str, pa.DataType]]


def prompt_schema(reward_model: Fields, extra_info: Fields) -> pa.Schema:
    """Schema of a prompt file, with the fields of `reward_model` behind `style` and of `extra_info` behind `index`."""
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
    """A temporary folder inside `folder`, whose files replace those in `folder` if nothing fails.

    After an error, or Ctrl-C, older files are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as partial:
        yield Path(partial)
        for file in sorted(Path(partial).iterdir()):
            os.replace(file, folder / file.name)


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
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while group := list(islice(written, ROW_GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
            kept += len(group)
    return kept, dropped
