"""Convert published data sets: find their files by split, read them row by row, and write rows in verl's format.

1. A file belongs to the split in its name (`train.jsonl`, `hellaswag_val.jsonl`, `test-00000-of-00001.parquet`),
   or else to the split in its folder's name (`test/algebra/1.json`).
2. JSON lines (also gzipped), parquet files and files with one JSON object give the same rows. Every row comes with its
   file and line as text (`FILE, line 3`), for errors.
"""

import argparse
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.prepare import parquet
from pipeline.config.paths import local_path

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet", ".json")
DOWNLOAD = "hf download {} --repo-type dataset --local-dir DIR"

Row = dict[str, Any]
Placed = Iterator[tuple[str, Row]]
"""Iterator over (file and line as text, row of an input file)."""
ToRows = Callable[[Placed, str, argparse.Namespace], Iterator[Row | None]]
"""Function from (input rows, split, options) to output rows; None stands for an input row that is left out."""


@dataclass(frozen=True)
class HubData:
    """A data set of the Hugging Face hub.

    Args:
        help: description of the data set.
        origin: arguments of `hf download`: the name of the data set on the hub, and options.
        keys: columns that must hold text; it may be empty only if `blanks` is True.
        outputs: prefix of an output file `PREFIXSPLIT.parquet` to its schema and the function that makes its rows.
        noun: word for the rows in messages.
        splits: (word in the names of input files and folders, name of the split) for each split.
        option: one more option, as (name, choices with the default first, help); None for no option.
        many_folders: True if the files of a split may be in several folders.
    """

    help: str
    origin: str
    keys: tuple[str, ...]
    outputs: dict[str, tuple[pa.Schema, ToRows]]
    noun: str = "problems"
    splits: tuple[tuple[str, str], ...] = (("train", "train"), ("test", "test"))
    many_folders: bool = False
    blanks: bool = False
    option: tuple[str, tuple[str, ...], str] | None = None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add `--input`, `--out` and the data set's own option."""
        text = f"the data set's files, or a folder that holds them; it comes from: {DOWNLOAD.format(self.origin)}"
        parser.add_argument("--input", type=local_path, nargs="+", required=True, metavar="PATH", help=text)
        text = "folder for SPLIT.parquet and the like (replaced)"
        parser.add_argument("--out", type=local_path, required=True, metavar="DIR", help=text)
        if self.option:
            name, choices, meaning = self.option
            parser.add_argument(name, choices=choices, default=choices[0], help=f"{meaning} (default: %(default)s)")

    def prepare(self, args: argparse.Namespace) -> None:
        """Write the parquet files of each split in the input. After an error, older files are unchanged."""
        report = []
        with parquet.together(args.out) as folder:
            for split, files in self.find(args.input, args.out).items():
                for prefix, (schema, to_rows) in self.outputs.items():
                    path = folder / f"{prefix}{split}.parquet"
                    kept, left_out = parquet.write(path, schema, to_rows(self.read(files), split, args))
                    if not kept:
                        raise ValueError(f"{', '.join(map(str, files))}: no {self.noun}")
                    note = f" ({left_out:,} left out)" if left_out else ""
                    report.append(f"{args.out / path.name}: {kept:,} {self.noun}{note}")
        print("\n".join(report))

    def find(self, inputs: Iterable[Path], out: Path) -> dict[str, list[Path]]:
        """Return the input files of each split, in order. Parquet files in `out` are skipped, as earlier output.

        Raises:
            ValueError: a path does not exist or gives no file, or a split has files of two kinds or in two folders.
        """
        sources: dict[str, list[Path]] = {}
        for path in inputs:
            files = sorted(path.rglob("*"), key=_order) if path.is_dir() else [path]
            matched = False
            for file in files:
                is_output = file.suffix == ".parquet" and file.resolve().parent == out.resolve()
                split = self._split(file, path)
                if split and file.is_file() and file.name.endswith(ENDINGS) and not is_output:
                    matched = True
                    sources.setdefault(split, []).append(file)
            if not matched:
                words = " or ".join(word for word, _ in self.splits)
                problem = f"has no {', '.join(ENDINGS)} file with {words} in its name or its folder's"
                if not path.exists():
                    problem = "does not exist"
                raise ValueError(f"--input {path} {problem}; get it with: {DOWNLOAD.format(self.origin)}")
        for split, files in sources.items():
            kinds = {(None if self.many_folders else file.parent, file.suffix) for file in files}
            if len(kinds) > 1 or len(set(files)) < len(files):
                raise ValueError(f"--input has two sources for {split}: {files[0]} and {files[-1]}; name one of them")
        return sources

    def _split(self, file: Path, root: Path) -> str | None:
        words = re.findall("[a-z]+", file.name.lower())
        words += [folder.name for folder in file.parents if folder == root or root in folder.parents]
        return next((dict(self.splits)[word] for word in words if word in dict(self.splits)), None)

    def read(self, files: Iterable[Path]) -> Placed:
        """Yield (file and line as text, row) for the rows of the files, one file after the other.

        Raises:
            ValueError: a file cannot be read, or a row does not have text in `keys`; the text names file and line.
        """
        for file in files:
            for where, row in placed_rows(file):
                if not isinstance(row, dict):
                    wanted = " and ".join(map(repr, self.keys))
                    raise ValueError(f"{where}: must be an object with {wanted}, not a {type(row).__name__}")
                for key in self.keys:
                    check_text(row.get(key), repr(key), where, self.blanks)
                yield where, row


def check_text(value: Any, name: str, where: str, blanks: bool = False) -> str:
    """Return `value`. Raises ValueError if it is not text, or is empty and `blanks` is False.

    The error text begins with `where` and names the value `name`.
    """
    if not isinstance(value, str) or not (value.strip() or blanks):
        raise ValueError(f"{where}: {name} must be text, not {str(value)[:80]!r}")
    return value


def _order(file: Path) -> tuple[Path, int, str]:
    return file.parent, int(file.stem) if file.stem.isascii() and file.stem.isdigit() else -1, file.name


def placed_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield (file and line as text, row) for the rows of a file, in any of the formats.

    Raises:
        ValueError: the file cannot be read, or a row is not JSON.
    """
    number, unit = 0, "row" if file.suffix == ".parquet" else "line"
    try:
        if file.suffix == ".parquet":
            with pq.ParquetFile(file) as source:
                for batch in source.iter_batches(batch_size=parquet.ROW_GROUP):
                    for row in batch.to_pylist():
                        number += 1
                        yield f"{file}, row {number}", row
        elif file.name.endswith((".json", ".json.gz")):
            content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
            yield str(file), _parse(content, str(file))
        else:
            with gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb") as stream:
                for number, raw in enumerate(stream, start=1):
                    if raw.strip():
                        where = f"{file}, line {number}"
                        yield where, _parse(raw, where)
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise ValueError(f"{file} cannot be read after {unit} {number}: {error}") from error


def _parse(raw: bytes, where: str) -> Any:
    try:
        # Editors of Windows begin a file with a byte order mark.
        value = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_object, parse_float=_number)
        if b"\\u" in raw:
            # An escape may encode half a character, which no file can hold.
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from error


def _object(pairs: list[tuple[str, Any]]) -> Row:
    """Return a JSON object as a dict. Raises ValueError for a repeated key, since one of its values would be lost."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return row


def _number(text: str) -> float:
    """Parse a fractional number of JSON. Raises ValueError if it is too large for a float."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number
