"""Convert rows in verl's format, from JSON or from folders saved by Hugging Face `datasets`, to parquet.

1. A JSON file becomes one parquet file of the same name. In a folder saved by `datasets`, the folder's index is read,
   and each split becomes one file.
2. Rows keep their keys, nulls, whole numbers and order. A column gets an Arrow type if this type holds all of its
   values without loss; other columns become JSON (`arrow.json`), which Slipstream's readers of prompts support.
3. The type of a column depends on all rows of the file, so the file is read twice, with one row group in memory.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobs.prepare import parquet, saved
from jobs.prepare.hub import placed_rows
from jobs.prepare.types import JSON, joined, type_of
from pipeline.config.paths import local_path

help = "JSON lines, JSON lists or folders saved by datasets, with rows in verl's form, to parquet"
ENDINGS = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".json.gz", ".arrow")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--input` and `--out`."""
    parser.add_argument("--input", type=local_path, nargs="+", required=True, metavar="PATH", help="files or folders")
    text = "folder of the parquet files (replaced)"
    parser.add_argument("--out", type=local_path, required=True, metavar="DIR", help=text)


def prepare(args: argparse.Namespace) -> None:
    """Write one parquet file for each input file or split. After an error, older files are unchanged."""
    report = []
    with parquet.together(args.out) as folder:
        for name, files in _inputs(args.input):
            target = folder / f"{name}.parquet"
            if target.exists():
                raise ValueError(f"two inputs are called {name}; convert them to different folders")
            count = _copy(files, target) if files[0].suffix == ".arrow" else _convert(files[0], target)
            report.append(f"{args.out / target.name}: {count:,} rows")
    print("\n".join(report))


def _inputs(paths: list[Path]) -> Iterator[tuple[str, list[Path]]]:
    """Yield (name of an output file, input files with its rows in order)."""
    for path in paths:
        if path.is_dir():
            found = list(_folder(path))
            if not found:
                raise ValueError(f"{path} holds no file that ends in {', '.join(ENDINGS)}")
            yield from found
        elif path.is_file() and path.name.endswith(ENDINGS):
            yield _stem(path), [path]
        else:
            raise ValueError(f"{path}: no such file or folder, or it does not end in {', '.join(ENDINGS)}")


def _folder(folder: Path) -> Iterator[tuple[str, list[Path]]]:
    splits = saved.splits(folder)
    if splits is not None:
        yield from splits.items()
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            yield from _folder(path)
        elif path.is_file() and path.name.endswith(ENDINGS):
            yield _stem(path), [path]


def _stem(file: Path) -> str:
    ending = max((ending for ending in ENDINGS if file.name.endswith(ending)), key=len)
    return file.name.removesuffix(ending)


def _convert(file: Path, target: Path) -> int:
    """Write the rows of a JSON file to the parquet file `target`. Returns the number of rows."""
    types: dict[str, pa.DataType] = {}
    for _, row in _objects(file):
        for name, value in row.items():
            if (known := types.get(name, pa.null())) != JSON:
                types[name] = joined(known, type_of(value))
    texts = [name for name, kind in types.items() if kind == JSON]

    def written(row: dict[str, Any]) -> dict[str, Any]:
        return row | {name: json.dumps(row[name]) for name in texts if row.get(name) is not None}

    count, _ = parquet.write(target, pa.schema(types.items()), (written(row) for _, row in _objects(file)))
    return count


def _copy(files: list[Path], target: Path) -> int:
    """Write the rows of Arrow stream files, one after the other, to the parquet file `target`. Returns the number of
    rows."""
    count, writer = 0, None
    try:
        for file in files:
            with pa.OSFile(str(file)) as handle, pa.ipc.open_stream(handle) as stream:
                writer = writer or parquet.writer(target, stream.schema)
                for batch in stream:
                    writer.write_batch(batch)
                    count += len(batch)
    # `write_batch` raises ValueError if the schema differs from the first file's.
    except (pa.ArrowException, ValueError) as error:
        raise ValueError(f"{file} cannot be read as an Arrow stream: {error}") from error
    finally:
        if writer is not None:
            writer.close()
    return count


def _objects(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (position as text, row) for the rows of a JSON file; each object of a list is a row."""
    for where, value in placed_rows(file):
        for number, row in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(row, dict):
                raise ValueError(f"{where}: entry {number} is a {type(row).__name__}, but an object is needed")
            yield where, row
