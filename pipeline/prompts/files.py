"""Prompt files: from what `data.train_files` names to parquet files known to be usable.

1. A path, folder or glob, local or behind any URL that pyarrow or fsspec opens, becomes an ordered list of files.
2. Only footers are read, in threads: row counts per row group and column types. That is enough to plan the order of
   any number of rows, and to refuse a wrong file before an engine starts.
3. Everything refused is refused with a sentence that names config key, file, column and remedy.
"""

import difflib
import functools
import itertools
import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem

# Opened by pyarrow itself, so that no further package is needed; every other scheme goes to fsspec.
ARROW_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
FOOTER_THREADS = 16
GCS_RETRY_SECONDS = 60
# One read of a column, and one batch of decoded rows: small beside a window, large beside a network round trip.
READ_BYTES = 4 << 20
READ_ROWS = 4096


class Place(NamedTuple):
    """Where a row stands, for error messages."""

    file: str
    row_group: int
    row: int
    """Number of the row in its file, from 0."""

    def __str__(self) -> str:
        return f"{self.file}, row {self.row} (row group {self.row_group})"


class Slice(NamedTuple):
    """Rows `start` to `stop` (not included) of one row group."""

    row_group: int
    start: int
    stop: int


@dataclass(frozen=True)
class PromptFile:
    """One parquet file of prompts whose footer has been read and whose columns have been checked."""

    name: str
    """Path or URL for people."""

    key: str
    """Config key that named the file, for messages."""

    filesystem: pyarrow.fs.FileSystem
    """Opens `path`; can be pickled."""

    path: str
    """Path inside `filesystem`."""

    row_groups: tuple[int, ...]
    """Rows of each row group."""

    columns: tuple[str, ...]
    """Columns of the file."""

    @property
    def rows(self) -> int:
        return sum(self.row_groups)

    def place(self, row_group: int, row: int) -> Place:
        """Where row `row` of a row group stands."""
        return Place(self.name, row_group, self._first_rows[row_group] + row)

    @functools.cached_property
    def _first_rows(self) -> list[int]:
        return [0, *itertools.accumulate(self.row_groups)]

    def read(self, slices: list[Slice], columns: list[str]) -> Iterator[tuple[Slice, pa.RecordBatch]]:
        """Rows of the slices, by place in the file, in batches of bounded size; each with where it stands.

        A slice inside a row group costs decoding the row group up to it (parquet cannot be entered in the middle).

        Raises:
            OSError: the file has gone, is damaged, or is not the one whose footer was read at the start.
        """
        row_group = min(slices).row_group
        try:
            with pq.ParquetFile(
                self.filesystem.open_input_file(self.path),
                # Without these two, pyarrow holds a row group's raw columns in memory, however large it is.
                pre_buffer=False,
                buffer_size=READ_BYTES,
            ) as file:
                found = tuple(file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups))
                if found != self.row_groups:
                    raise OSError(f"the file now has {sum(found)} rows in {len(found)} row groups")
                for row_group, wanted in itertools.groupby(sorted(slices), key=lambda s: s.row_group):
                    parts = list(wanted)
                    end = max(part.stop for part in parts)
                    row = 0
                    for batch in file.iter_batches(READ_ROWS, row_groups=[row_group], columns=columns):
                        for part in parts:
                            start, stop = max(part.start, row), min(part.stop, row + len(batch))
                            if start < stop:
                                yield Slice(row_group, start, stop), batch.slice(start - row, stop - start)
                        row += len(batch)
                        if row >= end:
                            break
        # Any filesystem package may stand behind the handle, each with its own exceptions.
        except Exception as error:
            raise OSError(
                f"{self.key}: {self.name}, row group {row_group}: could not be read, though its footer was read when "
                f"the run started: {reason(error)}. Put the file back as it was and start the same command again."
            ) from error


def resolve(paths: Any, key: str, prompt_key: str = "prompt") -> list[PromptFile]:
    """Files that `paths` names, in order: entries as given, the files of a folder or glob by name.

    Args:
        paths: a path, folder, glob or URL, or a list of them.
        key: config key they come from, for messages.
        prompt_key: column of the chat messages (`data.prompt_key`).

    Raises:
        FileNotFoundError: nothing stands at a path, or a glob matches nothing.
        ValueError: a file is not parquet, has no rows, or lacks a column.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    if not isinstance(paths, Iterable) or isinstance(paths, (bytes, dict)):
        raise ValueError(f"{key} is {paths!r}; give it a parquet file, a folder, a glob or a list of them")
    found = [file for path in paths for file in _find(os.fspath(path), key)]
    if not found:
        raise ValueError(f"{key} is an empty list; give it at least one parquet file")
    with ThreadPoolExecutor(min(FOOTER_THREADS, len(found))) as threads:
        return list(threads.map(lambda file: _footer(file, key, prompt_key), found))


def data_sources(files: list[PromptFile]) -> list[str]:
    """Distinct `data_source` values of all rows, sorted. Reads that column alone, a batch at a time.

    Raises:
        OSError: a file cannot be read.
        ValueError: a row has no `data_source`.
    """
    seen: set[str] = set()
    for file in files:
        slices = [Slice(number, 0, rows) for number, rows in enumerate(file.row_groups)]
        for part, batch in file.read(slices, ["data_source"]):
            column = batch.column(0)
            if column.null_count:
                row = part.start + pc.index(column.is_null(), True).as_py()
                raise ValueError(
                    f"{file.key}: {file.place(part.row_group, row)}: `data_source` is null; every row needs one"
                )
            seen.update(column.unique().to_pylist())
    return sorted(seen)


def _find(path: str, key: str) -> list[tuple[str, pyarrow.fs.FileSystem, str]]:
    """(name, filesystem, path) of each file that one entry names."""
    listing, place, root = _open(path, key)
    arrow: pyarrow.fs.FileSystem
    if isinstance(listing, LocalFileSystem):
        arrow = pyarrow.fs.LocalFileSystem()
    elif isinstance(listing, ArrowFSWrapper):
        arrow = listing.fs
    else:
        arrow = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(listing))
    try:
        files, missing = _files(listing, place, path)
    # Any filesystem package may be listing here, each with its own exceptions for "no such host" or "forbidden".
    except Exception as error:
        raise ValueError(
            f"{key}: {path} could not be listed: {reason(error)}. Check the address and the credentials."
        ) from error
    if not files:
        raise FileNotFoundError(f"{key}: {missing}")
    address = "" if isinstance(listing, LocalFileSystem) else path.partition("://")[0] + "://"
    if isinstance(listing, ArrowFSWrapper):
        address += _bucket(path)
    return [(address + file[len(root) :], arrow, file) for file in files]


def _bucket(url: str) -> str:
    return url.partition("://")[2].partition("/")[0].partition("?")[0]


def _open(path: str, key: str) -> tuple[fsspec.AbstractFileSystem, str, str]:
    """(filesystem for listing, path in it, part of that path that the bucket of the URL stands for)."""
    if "://" not in path:
        return LocalFileSystem(), os.path.abspath(os.path.expanduser(path)), ""
    scheme, _, rest = path.partition("://")
    try:
        if scheme in ARROW_SCHEMES:
            # `?` is a wildcard unless settings such as `?region=...` follow it.
            rest, *query = re.split(r"\?(?=\w+=)", rest, maxsplit=1)
            settings = "?" + query[0] if query else ""
            if scheme in ("gs", "gcs") and "retry_limit_seconds" not in settings:
                # Without it, pyarrow tries for a quarter of an hour where credentials are missing.
                settings = f"{settings or '?'}&retry_limit_seconds={GCS_RETRY_SECONDS}".replace("?&", "?")
            arrow, root = pyarrow.fs.FileSystem.from_uri(f"{scheme}://{_bucket(path)}{settings}")
            root = root.rstrip("/")
            return ArrowFSWrapper(arrow), f"{root}/{rest.partition('/')[2]}".rstrip("/"), root
        listing, place = fsspec.core.url_to_fs(path)
        return listing, place, ""
    except (ImportError, ValueError, OSError, NotImplementedError) as error:
        raise ValueError(
            f"{key}: {path} cannot be opened: {reason(error)}. A scheme that pyarrow does not know "
            "needs its fsspec package (`s3fs`, `gcsfs`, `adlfs`, `huggingface_hub`, ...)."
        ) from error


def _files(listing: fsspec.AbstractFileSystem, place: str, path: str) -> tuple[list[str], str]:
    """The file at `place`, a folder's parquet files at any depth or a glob's matches; and what is missing if none."""
    fixed = place
    if any(letter in place for letter in "*?[") and not listing.isfile(place):
        fixed = re.split(r"[*?\[]", place)[0].rpartition("/")[0]
    try:
        # `isfile`, `isdir` and `glob` answer "nothing there" when access is denied or a server is away; `info` raises.
        kind = listing.info(fixed)["type"]
    except FileNotFoundError:
        kind = "nothing"
    if fixed != place:
        files = [file for file in listing.glob(place) if listing.isfile(file)]
        return sorted(files), f"the glob {path} matches no file; check the folder and the pattern"
    if kind == "file":
        return [place], ""
    if kind == "directory":
        files = [file for file in listing.find(place) if file.endswith(".parquet") and _visible(file, place)]
        return sorted(files), f"folder {path} holds no .parquet file; name the files or another folder"
    near = _nearest(place.rsplit("/", 1)[-1], _siblings(listing, place))
    return [], f"{path} does not exist{near}; check the path"


def _visible(file: str, folder: str) -> bool:
    """False for the `_temporary` and `.cache` entries that writers leave in a folder."""
    return not any(part.startswith(("_", ".")) for part in file[len(folder) :].split("/"))


def _siblings(listing: fsspec.AbstractFileSystem, place: str) -> list[str]:
    folder = place.rpartition("/")[0]
    if not folder or not listing.isdir(folder):
        return []
    return [entry.rstrip("/").rsplit("/", 1)[-1] for entry in listing.ls(folder, detail=False)]


def _footer(file: tuple[str, pyarrow.fs.FileSystem, str], key: str, prompt_key: str) -> PromptFile:
    name, filesystem, path = file
    where = f"{key}: {name}"
    try:
        with filesystem.open_input_file(path) as handle:
            if handle.size() == 0:
                raise ValueError("it is empty (0 bytes)")
            with pq.ParquetFile(handle) as parquet:
                metadata, schema = parquet.metadata, parquet.schema_arrow
    # As in `PromptFile.read`: the exceptions depend on the filesystem package.
    except Exception as error:
        raise ValueError(
            f"{where} cannot be read as parquet: {reason(error)}. Write the file again, or leave it out."
        ) from error
    if metadata.num_rows == 0:
        raise ValueError(f"{where} has no rows; write prompts into it, or leave it out")
    _check_columns(schema, where, prompt_key)
    row_groups = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    return PromptFile(name, key, filesystem, path, row_groups, tuple(schema.names))


def _check_columns(schema: pa.Schema, where: str, prompt_key: str) -> None:
    for column, remedy in (
        (prompt_key, "name the column of chat messages with data.prompt_key"),
        ("data_source", "add it: it chooses the reward rule"),
        ("reward_model", "add it: a struct whose field `ground_truth` holds the answer"),
    ):
        if column not in schema.names:
            raise ValueError(
                f"{where} has no column {column!r}{_nearest(column, schema.names)}; {remedy}. "
                f"Its columns are {', '.join(schema.names) or 'none'}."
            )
    prompt = schema.field(prompt_key).type
    message = prompt.value_type if hasattr(prompt, "value_type") and not pa.types.is_dictionary(prompt) else None
    if message is None or not pa.types.is_struct(message) or not {"role", "content"} <= {f.name for f in message}:
        raise ValueError(
            f"{where}: column {prompt_key!r} (data.prompt_key) is of type {prompt} where chat messages are needed: a "
            'list of structs {role, content}, as in [{"role": "user", "content": "..."}]. Wrap plain text like this.'
        )
    for name in ("role", "content"):
        if not _is_text(message.field(name).type):
            raise ValueError(
                f"{where}: `{name}` in column {prompt_key!r} (data.prompt_key) is of type {message.field(name).type} "
                "where text is needed; write it as a string"
            )
    if not _is_text(schema.field("data_source").type):
        raise ValueError(
            f"{where}: column 'data_source' is of type {schema.field('data_source').type} where text is needed; "
            "write it as a string"
        )
    reward_model = schema.field("reward_model").type
    fields = [f.name for f in reward_model] if pa.types.is_struct(reward_model) else []
    if "ground_truth" not in fields:
        raise ValueError(
            f"{where}: column 'reward_model' is of type {reward_model} where a struct with the field `ground_truth` "
            f"is needed{_nearest('ground_truth', fields)}; write the answer there"
        )


def _is_text(type: pa.DataType) -> bool:
    if pa.types.is_dictionary(type):
        type = type.value_type
    return bool(pa.types.is_string(type) or pa.types.is_large_string(type) or pa.types.is_string_view(type))


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" (the nearest is {close[0]!r})" if close else ""


def reason(error: Exception) -> str:
    """What an exception of another library says, on one line and without its endless tail."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...").rstrip(". ")
