"""Prompt files with columns: parquet, and the Arrow streams in which `datasets` saves.

Of a parquet file only the footer is read when it is opened, of an Arrow stream the heads of its record batches (the
file is mapped into memory where it is local): row counts and column types are enough to plan an order and to refuse a
wrong file before an engine starts.
"""

import difflib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from pipeline.prompts.prompt_file import Place, PromptFile, reason

# One read of a column, and one batch of decoded rows: small beside a window, large beside a network round trip.
READ_BYTES = 4 << 20
READ_ROWS = 4096


@dataclass(frozen=True)
class Columnar(PromptFile):
    """A file whose rows are rows of Arrow columns."""

    columns: tuple[str, ...]
    """Columns of the file."""

    def row(self, batch: pa.RecordBatch, number: int, place: Place) -> dict[str, Any]:
        values: dict[str, Any] = batch.slice(number, 1).to_pylist()[0]
        return values

    def data_sources(self, batch: pa.RecordBatch) -> pa.Array:
        return batch.column("data_source")

    def _wanted(self, columns: list[str]) -> list[str]:
        return [name for name in columns if name.partition(".")[0] in self.columns]


@dataclass(frozen=True)
class ParquetFile(Columnar):
    """A parquet file."""

    @contextmanager
    def _opened(self) -> Iterator[pq.ParquetFile]:
        handle = self.filesystem.open_input_file(self.path)
        # Without these two, pyarrow holds a row group's raw columns in memory, however large it is.
        with pq.ParquetFile(handle, pre_buffer=False, buffer_size=READ_BYTES) as file:
            if (found := _row_groups(file)) != self.row_groups:
                raise OSError(f"the file now has {sum(found)} rows in {len(found)} row groups")
            yield file

    def _batches(self, reader: pq.ParquetFile, row_group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        yield from reader.iter_batches(READ_ROWS, row_groups=[row_group], columns=self._wanted(columns))


@dataclass(frozen=True)
class ArrowStream(Columnar):
    """An Arrow stream; its record batches are the row groups. It is passed through from its beginning."""

    def _opened(self) -> AbstractContextManager["_Batches"]:
        return _arrow(self.filesystem, self.path)

    def _batches(self, reader: "_Batches", row_group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        batch = reader.get(row_group)
        if len(batch) != self.row_groups[row_group]:
            raise OSError(f"record batch {row_group} now has {len(batch)} rows")
        # Further columns would stay in memory as long as the batch.
        yield batch.select(list(dict.fromkeys(name.partition(".")[0] for name in self._wanted(columns))))


class _Batches:
    """The record batches of an Arrow stream, by rising number."""

    def __init__(self, reader: pa.RecordBatchStreamReader) -> None:
        self.schema: pa.Schema = reader.schema
        self._reader, self._next = reader, 0

    def get(self, number: int) -> pa.RecordBatch:
        while True:
            batch = self._reader.read_next_batch()
            self._next += 1
            if self._next > number:
                return batch

    def counts(self) -> Iterator[int]:
        for batch in self._reader:
            yield len(batch)


@contextmanager
def _arrow(filesystem: pyarrow.fs.FileSystem, path: str) -> Iterator[_Batches]:
    local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
    with (
        pa.memory_map(path) if local else filesystem.open_input_stream(path, buffer_size=READ_BYTES) as handle,
        pa.ipc.open_stream(handle) as reader,
    ):
        yield _Batches(reader)


def open_parquet(name: str, filesystem: pyarrow.fs.FileSystem, path: str, key: str, prompt_key: str) -> ParquetFile:
    """The parquet file at `path`.

    Raises:
        ValueError: it is not parquet, has no rows, or lacks a column.
    """
    try:
        with filesystem.open_input_file(path) as handle:
            if handle.size() == 0:
                raise ValueError("it is empty (0 bytes)")
            with pq.ParquetFile(handle) as file:
                row_groups, schema = _row_groups(file), file.schema_arrow
    # As in `PromptFile.read`: the exceptions depend on the filesystem package.
    except Exception as error:
        raise _unreadable(f"{key}: {name}", "parquet", error) from error
    _check(schema, sum(row_groups), f"{key}: {name}", prompt_key)
    return ParquetFile(name, key, filesystem, path, row_groups, tuple(schema.names))


def open_arrow(name: str, filesystem: pyarrow.fs.FileSystem, path: str, key: str, prompt_key: str) -> ArrowStream:
    """The Arrow stream at `path`.

    Raises:
        ValueError: it is not an Arrow stream, has no rows, or lacks a column.
    """
    try:
        with _arrow(filesystem, path) as batches:
            schema, row_groups = batches.schema, tuple(batches.counts())
    except Exception as error:
        raise _unreadable(f"{key}: {name}", "an Arrow stream (what `datasets` saves)", error) from error
    _check(schema, sum(row_groups), f"{key}: {name}", prompt_key)
    return ArrowStream(name, key, filesystem, path, row_groups, tuple(schema.names))


def nearest(name: str, names: list[str]) -> str:
    """` (the nearest is 'x')` where one of `names` is close to `name`, else nothing."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" (the nearest is {close[0]!r})" if close else ""


def _row_groups(file: pq.ParquetFile) -> tuple[int, ...]:
    return tuple(file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups))


def _unreadable(where: str, what: str, error: Exception) -> ValueError:
    return ValueError(f"{where} cannot be read as {what}: {reason(error)}. Write the file again, or leave it out.")


def _check(schema: pa.Schema, rows: int, where: str, prompt_key: str) -> None:
    if not rows:
        raise ValueError(f"{where} has no rows; write prompts into it, or leave it out")
    for column, remedy in (
        (prompt_key, "name the column of chat messages with data.prompt_key"),
        ("data_source", "add it: it chooses the reward rule"),
        ("reward_model", "add it: a struct whose field `ground_truth` holds the answer"),
    ):
        if column not in schema.names:
            raise ValueError(
                f"{where} has no column {column!r}{nearest(column, schema.names)}; {remedy}. "
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
            f"is needed{nearest('ground_truth', fields)}; write the answer there"
        )


def _is_text(type: pa.DataType) -> bool:
    if pa.types.is_dictionary(type):
        type = type.value_type
    return bool(pa.types.is_string(type) or pa.types.is_large_string(type) or pa.types.is_string_view(type))
