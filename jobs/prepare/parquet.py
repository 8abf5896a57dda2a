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

ROW_GROUP = 4096  # rows held in memory and written together; also the unit in which the prompt source shuffles

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def prompt_schema(ground_truth: pa.DataType, extra_info: list[tuple[str, pa.DataType]]) -> pa.Schema:
    """Schema of a prompt file; `split` and `index` come before further `extra_info` fields."""
    return pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", MESSAGES),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", ground_truth)])),
            ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64()), *extra_info])),
        ]
    )


SFT = pa.schema([("messages", MESSAGES)])


@contextmanager
def together(folder: Path) -> Iterator[Path]:
    """A temporary folder inside `folder`; what was written there replaces the files of those names when all went well.

    After an error, or Ctrl-C, the files that were there before are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as partial:
        yield Path(partial)
        for file in sorted(Path(partial).iterdir()):
            os.replace(file, folder / file.name)


def write(path: Path, schema: pa.Schema, rows: Iterable[dict[str, Any]]) -> None:
    """Writes the rows with one row group in memory at a time."""
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        rows = iter(rows)
        while group := list(islice(rows, ROW_GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
