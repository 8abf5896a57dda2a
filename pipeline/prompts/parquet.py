"""Read parquet files of prompts: check the footer, and read rows in batches with their position in the file.

`pipeline/supervised` reads its files in the same way.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from pipeline.cells import check_names, is_list, is_text, may_be_object
from pipeline.conversations import may_be_messages
from pipeline.errors import nearest, short_reason

READ_BYTES = 4 << 20
"""Number of bytes per read of a column: little compared with a window of rows, enough to outweigh a network round
trip."""
MEDIA = ("images", "videos", "audios")
"""Columns of verl's format that hold images, videos or sound."""
READ_ROWS = 4096
"""Maximum number of rows in a decoded batch."""


class Place(NamedTuple):
    """The position of a row (file, row group, row), for error messages."""

    file: str
    row_group: int
    row: int
    """Number of the row in its file, from 0."""

    def __str__(self) -> str:
        return f"{self.file}, row {self.row} (row group {self.row_group})"


class Slice(NamedTuple):
    """Rows `start` to `stop` (excluded) of one row group."""

    row_group: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class PromptFile:
    """One parquet file whose footer has been read and whose columns have been checked."""

    name: str
    """Path or URL for messages."""
    key: str
    """Setting that named the file, for messages."""
    filesystem: pyarrow.fs.FileSystem
    path: str
    """Path inside `filesystem`."""
    row_groups: tuple[int, ...]
    """Number of rows in each row group."""
    schema: pa.Schema

    @property
    def rows(self) -> int:
        return sum(self.row_groups)

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)

    @property
    def media(self) -> list[str]:
        """Names of the columns that hold images, videos or sound."""
        return [field.name for field in self.schema if field.name in MEDIA or _is_media(field.type)]

    def place(self, row_group: int, row: int) -> Place:
        """Return the position of row `row` (counted from 0 in the row group `row_group`)."""
        return Place(self.name, row_group, self._first_rows[row_group] + row)

    def read(self, slices: list[Slice], columns: list[str]) -> Iterator[tuple[Slice, pa.RecordBatch]]:
        """Yield (slice, batch) for the rows of `slices` in file order. A batch has at most `READ_ROWS` rows.

        Reading a slice also decodes the rows before it in its row group.

        Args:
            slices: the rows to read.
            columns: `name`, or `name.field` for one field of a struct. Names that the file does not have are skipped;
                for a column that is not a struct, `name.field` reads the whole column.

        Raises:
            OSError: the file is missing or damaged, or its row groups are not those read at the start.
        """
        row_group = min(slices).row_group
        wanted_columns = [found for name in columns if (found := self._found(name)) is not None]
        try:
            with self._opened() as reader:
                for row_group, wanted in itertools.groupby(sorted(slices), key=lambda s: s.row_group):
                    parts = list(wanted)
                    end = max(part.stop for part in parts)
                    row = 0
                    for batch in reader.iter_batches(READ_ROWS, row_groups=[row_group], columns=wanted_columns):
                        for part in parts:
                            start, stop = max(part.start, row), min(part.stop, row + len(batch))
                            if start < stop:
                                yield Slice(row_group, start, stop), batch.slice(start - row, stop - start)
                        row += len(batch)
                        if row >= end:
                            break
        # The file handle may be of any filesystem package, each with its own exceptions.
        except Exception as error:
            raise OSError(
                f"{self.key}: {self.name}, row group {row_group}: could not be read, though it was when the run "
                f"started: {short_reason(error)}. Put the file back as it was and start the same command again."
            ) from error

    def data_sources(self) -> Iterator[tuple[Slice, pa.Table]]:
        """Yield (slice, table) with the columns `data_source` and, if present, `agent_name` of all rows, in batches.

        Errors are the same as for `read`.
        """
        whole = [Slice(number, 0, rows) for number, rows in enumerate(self.row_groups)]
        for part, batch in self.read(whole, ["data_source", "agent_name"]):
            # Arrow cannot group rows by string views.
            views = [
                column.cast(pa.string()) if column.type == pa.string_view() else column for column in batch.columns
            ]
            yield part, pa.table(views, names=batch.schema.names)

    def _found(self, name: str) -> str | None:
        """Return `name` as the file has it: the column, or `column.field` if the column is a struct; None if the column
        is missing."""
        column = name if name in self.columns else name.partition(".")[0]
        if column not in self.columns:
            return None
        return name if isinstance(self.schema.field(column).type, pa.StructType) else column

    @contextmanager
    def _opened(self) -> Iterator[pq.ParquetFile]:
        handle = self.filesystem.open_input_file(self.path)
        # Without these two arguments, pyarrow holds a row group's raw columns in memory, even if it is large.
        with pq.ParquetFile(handle, pre_buffer=False, buffer_size=READ_BYTES) as file:
            if (found := _row_groups(file)) != self.row_groups:
                raise OSError(f"the file now has {sum(found)} rows in {len(found)} row groups")
            yield file

    @functools.cached_property
    def _first_rows(self) -> list[int]:
        return [0, *itertools.accumulate(self.row_groups)]


def open_parquet(
    name: str, filesystem: pyarrow.fs.FileSystem, path: str, key: str, check: Callable[[pa.Schema, str], None]
) -> PromptFile:
    """Open the parquet file at `path` and check its footer.

    Args:
        name: path or URL of the file, for messages.
        filesystem: filesystem of the file.
        path: path in `filesystem`.
        key: setting that named the file, for messages.
        check: function of the schema and of the beginning of an error text, which raises ValueError if a column is
            missing.

    Raises:
        ValueError: the file is not parquet, has no rows, or lacks a column.
    """
    try:
        with filesystem.open_input_file(path) as handle:
            if handle.size() == 0:
                raise ValueError("it is empty (0 bytes)")
            with pq.ParquetFile(handle) as file:
                row_groups, schema = _row_groups(file), file.schema_arrow
    # As in `PromptFile.read`: the exceptions depend on the filesystem package.
    except Exception as error:
        raise ValueError(
            f"{key}: {name} cannot be read as parquet: {short_reason(error)}. Write the file again, or leave it out."
        ) from error
    if not sum(row_groups):
        raise ValueError(f"{key}: {name} has no rows; write some into it, or leave it out")
    check_names(schema.names, f"{key}: {name}")
    check(schema, f"{key}: {name}")
    return PromptFile(name, key, filesystem, path, row_groups, schema)


def data_sources(
    files: list[PromptFile], allow_bad: bool = False, check: Callable[[str | None], None] | None = None
) -> dict[str | None, list[str]]:
    """Return the sorted distinct values of `data_source` for each `agent_name`. Only these two columns are read.

    Args:
        files: the prompt files.
        allow_bad: True to skip rows without a `data_source` or with an unknown agent.
        check: function of an agent's name that raises ValueError if it is unknown; None: no check.

    Raises:
        OSError: a file cannot be read.
        ValueError: a row has no `data_source` or an unknown agent, and `allow_bad` is False.
    """
    seen: dict[str | None, set[str]] = {}
    for file in files:
        for part, columns in file.data_sources():
            for pair in columns.group_by(columns.column_names).aggregate([]).to_pylist():
                source, agent = pair["data_source"], pair.get("agent_name")
                try:
                    if source is None:
                        raise ValueError("`data_source` is null or no text; every row needs one")
                    if check is not None:
                        check(agent)
                except ValueError as error:
                    if allow_bad:
                        continue
                    number = columns.select(list(pair)).to_pylist().index(pair)
                    place = file.place(part.row_group, part.start + number)
                    raise ValueError(f"{file.key}: {place}: {error}") from None
                seen.setdefault(agent, set()).add(source)
    return {agent: sorted(sources) for agent, sources in seen.items()}


def _row_groups(file: pq.ParquetFile) -> tuple[int, ...]:
    return tuple(file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups))


def _is_media(kind: pa.DataType) -> bool:
    """Return True if `kind` is the type in which the package `datasets` stores images, videos or sound, or a list of
    it."""
    if is_list(kind):
        return _is_media(kind.value_type)
    fields = {field.name: field.type for field in kind} if isinstance(kind, pa.StructType) else {}
    return set(fields) == {"bytes", "path"} and pa.types.is_binary(fields["bytes"])


def check_prompts(schema: pa.Schema, where: str, prompt_key: str = "prompt") -> None:
    """Check that a file has the columns of a prompt file.

    Args:
        schema: schema of the file.
        where: beginning of the error text.
        prompt_key: `data.prompt_key`.

    Raises:
        ValueError: a column is missing or has another type.
    """
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
    prompt, source = schema.field(prompt_key).type, schema.field("data_source").type
    if not may_be_messages(prompt):
        raise ValueError(
            f"{where}: column {prompt_key!r} (data.prompt_key) is of type {prompt} instead of chat messages: a list of "
            'structs {role, content} of text, as in [{"role": "user", "content": "..."}]. Wrap plain text like this.'
        )
    if not is_text(source):
        raise ValueError(f"{where}: column 'data_source' is of type {source} instead of text; write it as a string")
    reward_model = schema.field("reward_model").type
    names = [field.name for field in reward_model] if pa.types.is_struct(reward_model) else []
    if "ground_truth" not in names and not may_be_object(reward_model):
        raise ValueError(
            f"{where}: column 'reward_model' is of type {reward_model} instead of a struct with the field "
            f"`ground_truth`{nearest('ground_truth', names)}; write the answer there"
        )
