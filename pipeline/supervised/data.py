"""Reads rows of parquet files and encodes them as rows of tokens, in a Ray Data stream, for the supervised jobs.

1. Files are read by row groups. The order of row groups, and the order of rows within one, depend only on seed and
   epoch, so a run is repeatable for any number of workers. Only the footers of files are read up front.
2. No row is removed from the stream, so the number of steps is known before the first row is read. A row that does not
   fit stays in the stream without tokens to learn from.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray.data

from pipeline.cells import values
from pipeline.config.model import ModelConfig
from pipeline.config.supervised import SupervisedDataConfig
from pipeline.conversations import Messages, rendered
from pipeline.errors import short_reason
from pipeline.models.ends import ends_of, find_ends
from pipeline.models.processor import Vision, load_vision
from pipeline.models.special_tokens import SpecialTokens, Spellings, special_tokens
from pipeline.models.template_arguments import arguments_of
from pipeline.models.tokenizer import load_tokenizer
from pipeline.omissions import Omissions, check_answer
from pipeline.prompts.files import resolve
from pipeline.prompts.parquet import PromptFile, Slice

SLICE_ROWS = 2048
CHECKED_ROWS = 256
"""Number of rows that are encoded as a check before a job starts; the others are checked when they are read."""

D = TypeVar("D", bound=SupervisedDataConfig)


class RowGroup(NamedTuple):
    """One row group of one parquet file."""

    file: PromptFile
    number: int
    """Number of the row group in the file, from 0."""
    first: int = 0
    """Number of the row group's first row among the rows of all files."""

    @property
    def rows(self) -> int:
        return self.file.row_groups[self.number]


class RowEncoder(ABC, Generic[D]):
    """Encoder that turns rows of files into rows of tokens, with the model's chat template."""

    def __init__(self, tokenizer: Any, data: D) -> None:
        self.tokenizer = tokenizer
        self.data = data
        self.vision: Vision | None = None
        """Processor of the images of conversations; None if only text is read."""
        self.omissions = Omissions()

    @classmethod
    def of(cls, model: ModelConfig, data: D) -> Self:
        """Make an encoder with the tokenizer, the end tokens and the processor of `model`."""
        encoder = cls(load_tokenizer(model), data)
        encoder.vision = None if model.vision == "none" else load_vision(model)
        encoder.ends = find_ends(model, encoder.tokenizer, data.apply_chat_template_kwargs).ids
        return encoder

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Ids of the end tokens (`models/ends.py`), by the tokenizer and the chat template unless `of` has set them."""
        return ends_of(self.tokenizer, self.data.apply_chat_template_kwargs).ids

    @cached_property
    def arguments_of_template(self) -> set[str]:
        """Names of the variables that the chat template reads and does not set itself."""
        return arguments_of(self.tokenizer, self.data.apply_chat_template_kwargs.get("chat_template"))

    @classmethod
    def find_row_groups(cls, paths: Any, key: str, data: D) -> list[RowGroup]:
        """Find the row groups of files, in order. Empty row groups are left out.

        Args:
            paths: value of the setting `key`, which names the files.
            key: name of the setting, for errors.
            data: settings of the data.

        Raises:
            ValueError: a file does not exist, is not parquet, has no rows, or lacks a column.
        """
        try:
            files = resolve(paths, key, lambda schema, where: cls.check(schema, where, data))
        except FileNotFoundError as error:
            raise ValueError(str(error)) from error
        groups, rows = [], 0
        for file in files:
            for number in range(len(file.row_groups)):
                groups.append(RowGroup(file, number, rows))
                rows += groups[-1].rows
        return [group for group in groups if group.rows]

    @staticmethod
    @abstractmethod
    def check(schema: pa.Schema, where: str, data: Any) -> None:
        """Check that a file has the columns that the encoder needs, with the right types.

        Args:
            schema: columns of the file.
            where: beginning of errors, which names the file.
            data: settings of the data.

        Raises:
            ValueError: a column is missing, or has another type.
        """

    @abstractmethod
    def columns(self) -> list[str | None]:
        """Return the names of the columns that `encode` reads if a file has them; None for a setting that is null."""

    def whole(self, rows: pa.Table, group: RowGroup) -> pa.Table:
        """Prepare the rows of a row group, in the file's order, before they are shuffled.

        A subclass may add columns here that depend on the order, such as row numbers.
        """
        return rows

    @abstractmethod
    def encode(self, rows: pa.Table, places: list[str]) -> pa.Table:
        """Encode each row as one row of tokens. Names of columns with token ids end with `_ids`.

        Args:
            rows: rows with the `columns` that the file has.
            places: file and number of each row, for errors.

        Raises:
            ValueError: a row cannot be used; the sentence begins with the row's entry in `places`.
        """

    @cached_property
    def special(self) -> SpecialTokens:
        """The special tokens of the tokenizer."""
        return special_tokens(self.tokenizer)

    def spellings(self, given: Any, place: str) -> Spellings:
        """Find the special tokens that texts of a conversation spell, and keep a note on them for the user.

        Args:
            given: the conversation, of JSON's types.
            place: file and number of the row, for errors.
        """
        spellings = self.special.spellings(given, f"{place}: ")
        self.omissions.note(spellings.note)
        return spellings

    def check_written(self, messages: Messages, text: str, place: str, start: int = 0, **more: Any) -> None:
        """Raise ValueError if the chat template omits a part of a conversation; see `Omissions.check` and `render`."""
        self.omissions.check(messages, text, lambda some: self.render(some, False, place, **more), place, start)

    def check_answer(self, messages: Messages, text: str, place: str, **more: Any) -> None:
        """Raise ValueError if the chat template omits a part of the last message, the assistant's; see `render`."""
        check_answer(messages, text, lambda some: self.render(some, False, place, **more), place)

    def render(self, messages: Messages, generate: bool, place: str, **more: Any) -> str:
        """Render messages with the chat template.

        Args:
            messages: as from `read_messages`.
            generate: whether to end with the opening of an assistant message (`add_generation_prompt`).
            place: beginning of errors: file and number of the row.
            more: further arguments of the template, which override `data.apply_chat_template_kwargs`.

        Raises:
            ValueError: the template fails.
        """
        arguments = {**self.data.apply_chat_template_kwargs, **more}

        def render(some: Messages) -> str:
            # A template is foreign code and may raise anything.
            try:
                text = self.tokenizer.apply_chat_template(
                    some, tokenize=False, add_generation_prompt=generate, **arguments
                )
            except Exception as error:
                raise ValueError(f"{place}: the model's chat template fails: {short_reason(error)}") from error
            return str(text)

        return rendered(messages, render)

    def write(self, spellings: Spellings, messages: Messages, generate: bool, place: str, **more: Any) -> str:
        """Render as `render` does, with stand-ins for special tokens that texts spell (`Spellings.render`)."""
        return spellings.render(lambda given: self.render(given[0], generate, place, **given[1]), (messages, more))

    def answer_length(self, part: list[int]) -> int:
        """Return how many of the tokens `part`, an assistant message as the template writes it, the policy generates.

        These are the tokens up to and including the end token. The template may write more after it, such as a newline,
        which the policy never generates.
        """
        places = [place for place, token in enumerate(part) if token in self.ends]
        if not places:
            return len(part)
        last = places.pop()
        # Some templates end the text after the turn, perhaps after a newline.
        while places and not self.tokenizer.decode(part[places[-1] + 1 : last]).strip():
            last = places.pop()
        return last + 1


def read(
    group: RowGroup, encoder: RowEncoder[Any], random: np.random.Generator | None, first: int = 0
) -> Iterator[pa.Table]:
    """Yield the encoded rows of one row group, at most `SLICE_ROWS` at a time.

    Args:
        group: the row group.
        encoder: encodes the rows.
        random: shuffles the rows; None keeps the order of the file.
        first: number of rows to leave out at the beginning of the order.
    """
    rows = encoder.whole(_read(group, encoder, group.rows), group)
    order = np.arange(group.rows) if random is None else random.permutation(group.rows)
    for start in range(first, group.rows, SLICE_ROWS):
        part = order[start : start + SLICE_ROWS]
        places = [str(group.file.place(group.number, int(row))) for row in part]
        yield encoder.encode(rows.take(pa.array(part)), places)


def _read(group: RowGroup, encoder: RowEncoder[Any], rows: int) -> pa.Table:
    """Read the first `rows` rows of a row group. Raises ValueError if one has images, videos or sound that the encoder
    does not read."""
    media = [name for name in group.file.media if name not in encoder.columns()]
    columns = [name for name in [*encoder.columns(), *media] if name]
    parts = list(group.file.read([Slice(group.number, 0, rows)], columns))
    for part, batch in parts if media else ():
        for number, row in enumerate(values(batch.select(media)), part.start):
            if found := [name for name in media if row[name]]:
                place = group.file.place(group.number, number)
                raise ValueError(f"{place}: the column {found[0]!r} has content, and only text can be trained")
    return pa.Table.from_batches([batch for _, batch in parts]).drop_columns(media)


@dataclass
class CheckedRows:
    """The first rows of the files, which are encoded before a job starts."""

    notes: list[str] = field(default_factory=list)
    """Sentences for the user on columns and fields that are not read."""
    lengths: list[int] = field(default_factory=list)
    """Number of tokens of each checked row of the training files."""
    first: str = ""
    """The first training row as the model reads it."""


def token_columns(table: pa.Table) -> list[str]:
    """Return the names of the columns with token ids."""
    return [name for name in table.column_names if name.endswith("_ids")]


def token_counts(table: pa.Table) -> list[int]:
    """Return the number of tokens of each row, over all columns with token ids."""
    counts = [pc.list_value_length(table[name]).to_numpy() for name in token_columns(table)]
    return [int(count) for count in np.sum(counts, axis=0)]


def check_rows(train: list[RowGroup], val: list[RowGroup], encoder: RowEncoder[Any]) -> CheckedRows:
    """Encode the first rows of the files as a check, about `CHECKED_ROWS` rows in all.

    Raises:
        ValueError: one of these rows cannot be used.
    """
    checked, groups = CheckedRows(), [*train, *val]
    names = {group.file.name for group in train}
    first = list({group.file.name: group for group in reversed(groups)}.values())[::-1][:CHECKED_ROWS]
    for group in first:
        rows = encoder.whole(_read(group, encoder, min(group.rows, max(1, CHECKED_ROWS // len(first)))), group)
        places = [f"{group.file.key}: {group.file.place(group.number, row)}" for row in range(len(rows))]
        encoded = encoder.encode(rows, places)
        if group.file.name in names:
            checked.lengths += token_counts(encoded)
            texts = (encoder.tokenizer.decode(encoded[name][0].as_py()) for name in token_columns(encoded))
            checked.first = checked.first or "\n".join(texts)
        unread = [name for name in group.file.columns if name not in encoder.columns()]
        if unread:
            checked.notes.append(
                f"{group.file.key}: {group.file.name} has columns that are not read: {', '.join(unread)}"
            )
    checked.notes += encoder.omissions.notes
    return checked


def held_rows(
    groups: list[RowGroup], encoder: RowEncoder[Any], limit: int, rank: int, world_size: int
) -> pa.Table | None:
    """Read one rank's share of the validation rows into memory; None without row groups.

    Args:
        groups: row groups of the validation files.
        encoder: encodes the rows.
        limit: number of rows over all ranks, the first ones; negative for all.
        rank: this rank.
        world_size: number of ranks; row i goes to rank i modulo this.
    """
    tables: list[pa.Table] = []
    rows_before = 0
    for group in groups:
        for table in read(group, encoder, None):
            if limit >= 0:
                table = table.slice(0, max(0, limit - rows_before))
            share = np.arange((rank - rows_before) % world_size, len(table), world_size)
            tables.append(table.take(pa.array(share)))
            rows_before += len(table)
        if 0 <= limit <= rows_before:
            break
    return pa.concat_tables(tables) if tables else None


class Reader:
    """The Ray Data stage that reads row groups, given by epoch and number, and returns encoded rows."""

    def __init__(
        self, groups: list[RowGroup], encoder: type[RowEncoder[Any]], model: ModelConfig, data: Any, seed: int
    ) -> None:
        self.groups = groups
        self.seed = seed
        self.encoder = encoder.of(model, data)

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        for part in batch.to_pylist():
            key = [self.seed, part["epoch"], part["group"]]
            random = np.random.default_rng(key) if self.encoder.data.shuffle else None
            yield from read(self.groups[part["group"]], self.encoder, random, part["first"])


def reading_order(groups: list[RowGroup], seed: int | None, epochs: int, done: int) -> list[dict[str, int]]:
    """Return the row groups of all epochs in the order in which they are read, each with its first row to read.

    Args:
        groups: row groups of the training files.
        seed: seed of the order; None keeps the order of the files.
        epochs: number of epochs.
        done: number of rows to leave out at the beginning.
    """
    order = []
    for epoch in range(epochs):
        numbers = range(len(groups)) if seed is None else np.random.default_rng([seed, epoch]).permutation(len(groups))
        for number in map(int, numbers):
            if done < groups[number].rows:
                order.append({"epoch": epoch, "group": number, "first": max(done, 0)})
            done -= groups[number].rows
    return order


def train_dataset(
    groups: list[RowGroup],
    encoder: type[RowEncoder[Any]],
    model: ModelConfig,
    data: SupervisedDataConfig,
    seed: int,
    epochs: int,
    block_rows: int,
    done: int = 0,
) -> ray.data.Dataset:
    """Build the stream of encoded rows of all epochs, in an order that depends only on the seed.

    Args:
        groups: row groups of the training files.
        encoder: class of the encoder.
        model: settings of the model, for the tokenizer.
        data: settings of the data.
        seed: seed of the order.
        epochs: number of epochs.
        block_rows: number of rows of each block; the last may have fewer.
        done: number of rows to leave out at the beginning, which a run that continues has trained on.
    """
    order = reading_order(groups, seed if data.shuffle else None, epochs, done)
    stream = ray.data.from_items(order, override_num_blocks=len(order)).map_batches(
        Reader,
        fn_constructor_args=(groups, encoder, model, data, seed),
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=1,
        udf_modifying_row_count=True,
    )
    return stream.repartition(target_num_rows_per_block=block_rows, strict=True)


def lists(rows: Iterable[pa.ListScalar]) -> list[np.ndarray]:
    """Convert each list of integers of an Arrow column to an int64 array."""
    return [row.values.to_numpy().astype(np.int64) for row in rows]
