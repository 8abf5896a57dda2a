"""The prompt source: any number of parquet rows as one repeatable stream of chunks.

1. The order of an epoch follows from (files, seed, epoch) and footers alone. Row groups are permuted and laid into
   windows of at most `data.shuffle_window_rows` rows, and each window is permuted. A row group larger than half a
   window is cut into equal slices first, so a window always mixes several parts of the data and its memory is
   bounded however the files were written.
2. A position is (epoch, offset), where offset counts the rows of the epoch's order, filtered ones included. Windows
   before it are skipped without being read.
3. Rows stay Arrow until a chunk is cut. One window is held at a time.
4. Chunks run across epoch borders: no prompt is lost to an incomplete batch, save at the very end of the run.
"""

import bisect
import datetime
import decimal
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.prompts.chat import ChatTokenizer
from pipeline.prompts.config import DataConfig
from pipeline.prompts.files import Place, PromptFile, Slice
from pipeline.rows import PROMPT

# Columns that depend on the run and not on the prompt; `stamp` adds them.
STAMPED = ("split", "chunk", "iteration")
COLUMNS = pa.schema([field for field in PROMPT if field.name not in STAMPED])


class Position(NamedTuple):
    """A place in the endless order of prompts."""

    epoch: int = 0
    offset: int = 0
    """Rows of the epoch's order that lie before it, filtered ones included."""


START = Position()


class Unit(NamedTuple):
    """Rows that are drawn together: a row group, or a slice of a large one."""

    file: int
    part: Slice

    @property
    def rows(self) -> int:
        return self.part.stop - self.part.start


@dataclass(frozen=True)
class Window:
    """Units that are shuffled together."""

    number: int
    start: int
    """Offset of its first row in the epoch."""
    units: tuple[Unit, ...]

    @property
    def rows(self) -> int:
        return sum(unit.rows for unit in self.units)


class PromptSource:
    """A resumable, repeatable stream of prompts. Plain Python: it needs no Ray, and can be pickled."""

    def __init__(
        self, files: list[PromptFile], data: DataConfig, chat: ChatTokenizer, seed: int, split: str = "train"
    ) -> None:
        """
        Args:
            files: what `files.resolve` returned; they are not opened here.
            data: order, limits and the prompt column.
            chat: makes tokens of messages.
            seed: seed of the order, together with the epoch.
            split: `train` (shuffled by `data.shuffle`, `data.train_max_samples`) or `val` (file order,
                `data.val_max_samples`).

        Raises:
            ValueError: a setting is out of range.
        """
        if split not in ("train", "val"):
            raise ValueError(f"split is {split!r}; it must be 'train' or 'val'")
        key = f"{split}_max_samples"
        limit: int = getattr(data, key)
        if limit == 0 or limit < -1:
            raise ValueError(f"data.{key} is {limit}; give a number of rows of at least 1, or -1 for all")
        if data.shuffle_window_rows < 1:
            raise ValueError(f"data.shuffle_window_rows is {data.shuffle_window_rows}; it must be at least 1")
        self.files = files
        self.data = data
        self.chat = chat
        self.seed = seed
        self.split = split
        self.shuffle = data.shuffle and split == "train"
        self.units = _units(files, data.shuffle_window_rows, limit)
        self.filtered_overlong = 0
        """Prompts left out so far because they are longer than `data.max_prompt_length`."""
        self.truncated = 0
        """Prompts cut so far to `data.max_prompt_length`."""

    @property
    def len_estimate(self) -> int:
        """Prompts per epoch by the footers: exact, unless overlong prompts are filtered."""
        return sum(unit.rows for unit in self.units)

    def chunks(self, chunk_prompts: int, start: Position = START, epochs: int | None = None) -> Iterator[pa.Table]:
        """Tables of exactly `chunk_prompts` rows with the columns `COLUMNS`, from `start` on.

        The stream ends before epoch `epochs` (never, where None) at the last full chunk. `position_after` a table is
        the `start` that continues behind it.

        Raises:
            ValueError: a row is not usable (see `ChatTokenizer`), or a whole epoch yields no prompt.
            OSError: a file has gone, is damaged or has changed since the start.
        """
        if chunk_prompts < 1:
            raise ValueError(f"a chunk of {chunk_prompts} prompts was asked for; it must have at least 1")
        rows = self._prompts(chunk_prompts, start, epochs)
        while len(chunk := list(itertools.islice(rows, chunk_prompts))) == chunk_prompts:
            yield _table(chunk)

    def validation_rows(self, chunk_prompts: int) -> Iterator[pa.Table]:
        """Every row once, in order, in tables of `chunk_prompts` rows; the last may be smaller. Raises as `chunks`."""
        rows = self._prompts(chunk_prompts, Position(), 1)
        while chunk := list(itertools.islice(rows, chunk_prompts)):
            yield _table(chunk)

    def windows(self, epoch: int) -> list[Window]:
        """The windows of an epoch in order, from metadata alone."""
        units = self.units
        if self.shuffle:
            units = [units[i] for i in self._random(epoch).permutation(len(units))]
        windows: list[Window] = []
        held: list[Unit] = []
        start, rows = 0, 0
        for unit in units:
            if held and rows + unit.rows > self.data.shuffle_window_rows:
                windows.append(Window(len(windows), start, tuple(held)))
                start, rows, held = start + rows, 0, []
            held.append(unit)
            rows += unit.rows
        return [*windows, Window(len(windows), start, tuple(held))]

    def _random(self, *place: int) -> np.random.Generator:
        # `spawn_key` keeps (epoch,) and (epoch, 0) apart; plain entropy lists are padded with zeros and do not.
        return np.random.default_rng(np.random.SeedSequence(self.seed % 2**64, spawn_key=place))

    def _prompts(self, batch_rows: int, start: Position, epochs: int | None) -> Iterator[dict[str, Any]]:
        """Rows of `COLUMNS` one by one; tokenised `batch_rows` at a time."""
        offset = start.offset
        for epoch in itertools.count(start.epoch):
            if epochs is not None and epoch >= epochs:
                return
            kept = 0
            rows = self._rows(epoch, offset)
            while batch := list(itertools.islice(rows, batch_rows)):
                for row in self._encode(epoch, batch):
                    kept += 1
                    yield row
            if not kept and not offset:
                raise ValueError(
                    f"{self.files[0].key}: all {self.len_estimate} prompts are longer than "
                    f"data.max_prompt_length={self.data.max_prompt_length} and data.filter_overlong_prompts leaves "
                    "them out; raise data.max_prompt_length"
                )
            offset = 0

    def _rows(self, epoch: int, offset: int) -> Iterator[tuple[int, Place, dict[str, Any]]]:
        """(offset, place, row as read) in the epoch's order from `offset` on."""
        for window in self.windows(epoch):
            if window.start + window.rows > offset:
                yield from self._window_rows(epoch, window, max(offset - window.start, 0))

    def _window_rows(self, epoch: int, window: Window, skip: int) -> Iterator[tuple[int, Place, dict[str, Any]]]:
        parts, firsts = self._load(window)
        order = self._random(epoch, window.number).permutation(window.rows) if self.shuffle else range(window.rows)
        for place in range(skip, window.rows):
            row = int(order[place])
            number = bisect.bisect_right(firsts, row) - 1
            file, part, batch = parts[number]
            local = row - firsts[number]
            values = batch.slice(local, 1).to_pylist()[0]
            yield window.start + place, self.files[file].place(part.row_group, part.start + local), values

    def _load(self, window: Window) -> tuple[list[tuple[int, Slice, pa.RecordBatch]], list[int]]:
        """The window's rows as read, in file order, and the number of each batch's first row."""
        parts = []
        for file, units in itertools.groupby(sorted(window.units), key=lambda unit: unit.file):
            columns = [self.data.prompt_key, "data_source", "reward_model.ground_truth"]
            if "extra_info" in self.files[file].columns:
                columns.append("extra_info")
            parts += [(file, *read) for read in self.files[file].read([unit.part for unit in units], columns)]
        return parts, [0, *itertools.accumulate(len(batch) for _, _, batch in parts)][:-1]

    def _encode(self, epoch: int, batch: list[tuple[int, Place, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
        places = [place for _, place, _ in batch]
        tokens = self.chat.encode([row[self.data.prompt_key] for _, _, row in batch], places)
        for (offset, place, row), ids in zip(batch, tokens, strict=True):
            fitted = self.chat.fit(ids, place)
            if fitted is None:
                self.filtered_overlong += 1
                continue
            self.truncated += len(fitted) < len(ids)
            if row["data_source"] is None:
                raise ValueError(f"{place}: `data_source` is null; every row needs one")
            reward_model, extra_info = row["reward_model"] or {}, row.get("extra_info")
            yield {
                "uid": f"{epoch}-{offset}" if self.split == "train" else f"val-{offset}",
                "epoch": epoch,
                "offset": offset,
                "data_source": row["data_source"],
                "prompt": to_json(row[self.data.prompt_key], place, self.data.prompt_key),
                "prompt_ids": fitted,
                "ground_truth": to_json(reward_model.get("ground_truth"), place, "reward_model.ground_truth"),
                "extra_info": to_json({} if extra_info is None else extra_info, place, "extra_info"),
            }


def position_after(table: pa.Table) -> Position:
    """Where the stream continues behind a chunk."""
    return Position(table["epoch"][-1].as_py(), table["offset"][-1].as_py() + 1)


def stamp(table: pa.Table, split: str, chunk: int, iteration: int) -> pa.Table:
    """A chunk with all columns of `rows.PROMPT`: split, chunk and iteration are the same in every row."""
    stamps = {
        "split": pa.repeat(pa.scalar(split), len(table)),
        "chunk": pa.repeat(pa.scalar(chunk, pa.int64()), len(table)),
        "iteration": pa.repeat(pa.scalar(iteration, pa.int64()), len(table)),
    }
    return pa.table([stamps.get(f.name) or table[f.name] for f in PROMPT], schema=PROMPT)


def to_json(value: Any, place: Place, column: str) -> str:
    """`value` as JSON. Exact decimals become numbers where a float holds them and text otherwise; dates are ISO 8601.

    Raises:
        ValueError: the value holds bytes or something else that JSON has no place for.
    """
    try:
        return json.dumps(value, default=_plain, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{place}: column {column!r} cannot be written as JSON: {error}; store numbers, text, lists or structs"
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, decimal.Decimal):
        if value == value.to_integral_value():
            return int(value)
        return float(value) if decimal.Decimal(repr(float(value))) == value else str(value)
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    raise TypeError(f"it holds a value of type {type(value).__name__}")


def _units(files: list[PromptFile], window_rows: int, limit: int) -> list[Unit]:
    """Row groups in file order, those above half a window cut into equal slices, up to `limit` rows (-1: all)."""
    most = max(window_rows // 2, 1)
    left = limit if limit >= 0 else sum(file.rows for file in files)
    units = []
    for file, prompt_file in enumerate(files):
        for row_group, found in enumerate(prompt_file.row_groups):
            rows = min(found, left)
            left -= rows
            slices = -(-rows // most)
            for i in range(slices):
                units.append(Unit(file, Slice(row_group, rows * i // slices, rows * (i + 1) // slices)))
    return units


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.table(
        {field.name: pa.array([row[field.name] for row in rows], field.type) for field in COLUMNS}, schema=COLUMNS
    )
