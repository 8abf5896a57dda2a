"""Rows that are in verl's form already, in JSON or as Hugging Face `datasets` saves them, to parquet.

Each input file becomes one parquet file of the same name. The types of the columns come from all rows of the file, so
it is passed through twice; one row group is in memory at a time.
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.prepare import parquet
from jobs.prepare.hub import placed_rows
from pipeline.config.paths import local_path

help = "JSON lines, JSON lists or folders saved by datasets, with rows in verl's form, to parquet"
ENDINGS = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".json.gz", ".arrow")
DESCRIPTIONS = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Files that `datasets` writes beside its data."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--input` and `--out`."""
    parser.add_argument("--input", type=local_path, nargs="+", required=True, metavar="PATH", help="files or folders")
    text = "folder of the parquet files (replaced)"
    parser.add_argument("--out", type=local_path, required=True, metavar="DIR", help=text)


def prepare(args: argparse.Namespace) -> None:
    """Write one parquet file for each input file; after an error older output files are untouched."""
    with parquet.together(args.out) as folder:
        for file in _files(args.input):
            target = folder / f"{_stem(file)}.parquet"
            if target.exists():
                raise ValueError(f"two input files are called {_stem(file)}; convert them to different folders")
            print(f"{args.out / target.name}: {_convert(file, target):,} rows")


def _files(inputs: list[Path]) -> Iterator[Path]:
    for path in inputs:
        if path.is_dir():
            found = [file for file in sorted(path.rglob("*")) if file.name.endswith(ENDINGS)]
            found = [file for file in found if file.name not in DESCRIPTIONS]
            if not found:
                raise ValueError(f"{path} holds no file that ends in {', '.join(ENDINGS)}")
            yield from found
        elif path.is_file() and path.name.endswith(ENDINGS):
            yield path
        else:
            raise ValueError(f"{path}: there is no such file or folder, or it does not end in {', '.join(ENDINGS)}")


def _stem(file: Path) -> str:
    ending = max((ending for ending in ENDINGS if file.name.endswith(ending)), key=len)
    return file.name.removesuffix(ending)


def _convert(file: Path, target: Path) -> int:
    """Write the rows of `file` to `target`; returns their number."""
    if file.suffix == ".arrow":
        return _copy(file, target)
    schema = pa.schema([])
    try:
        for table in _tables(file):
            schema = pa.unify_schemas([schema, table.schema], promote_options="permissive")
    except (pa.ArrowException, TypeError) as error:
        raise ValueError(f"{file}: a column holds values of two types: {error}") from error
    count, _ = parquet.write(target, schema, (row for _, row in _objects(file)))
    return count


def _copy(file: Path, target: Path) -> int:
    """Copy an Arrow stream batch by batch."""
    count = 0
    try:
        with (
            pa.OSFile(str(file)) as handle,
            pa.ipc.open_stream(handle) as stream,
            pq.ParquetWriter(target, stream.schema, compression="zstd") as writer,
        ):
            for batch in stream:
                writer.write_batch(batch)
                count += len(batch)
    except pa.ArrowException as error:
        raise ValueError(f"{file} cannot be read as an Arrow stream: {error}") from error
    return count


def _tables(file: Path) -> Iterator[pa.Table]:
    rows = _objects(file)
    while group := list(islice(rows, parquet.ROW_GROUP)):
        yield pa.Table.from_pylist([row for _, row in group])


def _objects(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a file of JSON; a list of objects counts as its objects."""
    for where, value in placed_rows(file):
        for number, row in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(row, dict):
                raise ValueError(f"{where}: entry {number} is a {type(row).__name__} where an object is needed")
            yield where, row
