"""Input and output files of `python -m jobs.prepare`."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.prepare.__main__ import main

Rows = list[dict[str, Any]]


def write(path: Path, rows: Rows) -> Path:
    """Write rows in the format that the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def prepare(data_set: str, *inputs: Path, out: Path, options: tuple[str, ...] = ()) -> int:
    return main([data_set, "--input", *map(str, inputs), "--out", str(out), *options])


def read(path: Path) -> Rows:
    return pq.read_table(path).to_pylist()


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()} if folder.exists() else {}
