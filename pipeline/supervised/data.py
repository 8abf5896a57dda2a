"""The reader of parquet rows as token rows, in a Ray Data stream.

1. The unit of work is a row group. Its place in the order, and the order of its rows, follow only from seed and epoch,
   so a run repeats itself on any number of workers. Only footers are read up front.
2. No row is ever left out of the stream, so the number of steps is known before the first row is read. A row without
   anything to learn stays in, and nothing is learnt from it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import pyarrow as pa
import ray.data

from pipeline.cells import values
from pipeline.config.model import ModelConfig
from pipeline.config.supervised import SupervisedDataConfig
from pipeline.conversations import Messages, rendered
from pipeline.errors import short_reason
from pipeline.models.ends import ends_of, find_ends
from pipeline.models.special_tokens import SpecialTokens, Spellings, special_tokens
from pipeline.models.template_arguments import arguments_of
from pipeline.models.tokenizer import load_tokenizer
from pipeline.omissions import Omissions, check_answer
from pipeline.prompts.files import resolve
from pipeline.prompts.parquet import PromptFile, Slice

SLICE_ROWS = 2048
CHECKED_ROWS = 256
"""Number of rows that are encoded before anything starts; the others are checked as they are read."""

D = TypeVar("D", bound=SupervisedDataConfig)


class RowGroup(NamedTuple):
    """One row group of one file."""

    file: PromptFile
    number: int
    first: int = 0
    """Number of its first row among the rows of all files."""

    @property
    def rows(self) -> int:
        return self.file.row_groups[self.number]


class RowEncoder(ABC, Generic[D]):
    """Encoder of a file's rows as token rows, with the model's chat template."""

    def __init__(self, tokenizer: Any, data: D) -> None:
        self.tokenizer = tokenizer
        self.data = data
        self.omissions = Omissions()

    @classmethod
    def of(cls, model: ModelConfig, data: D) -> Self:
        """Make an encoder with the model's tokenizer, and the ends of its answers."""
        encoder = cls(load_tokenizer(model), data)
        encoder.ends = find_ends(model, encoder.tokenizer, data.apply_chat_template_kwargs).ids
        return encoder

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer (`models/ends.py`); without a model, only the tokenizer determines them."""
        return ends_of(self.tokenizer, self.data.apply_chat_template_kwargs).ids

    @cached_property
    def arguments_of_template(self) -> set[str]:
        """The variables that the chat template takes from outside."""
        return arguments_of(self.tokenizer, self.data.apply_chat_template_kwargs.get("chat_template"))

    @classmethod
    def find_row_groups(cls, paths: Any, key: str, data: D) -> list[RowGroup]:
        """Find the row groups of all files that `paths`, the value of the setting `key`, names, in order.

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
        """Refuse a file that lacks a column.

        Raises:
            ValueError: the sentence begins with `where`.
        """

    @abstractmethod
    def columns(self) -> list[str | None]:
        """Return the columns that `encode` reads if a file has them."""

    def whole(self, rows: pa.Table, group: RowGroup) -> pa.Table:
        """Prepare a row group's rows in the file's order, before they are shuffled; may add columns that need all
        rows."""
        return rows

    @abstractmethod
    def encode(self, rows: pa.Table, places: list[str]) -> pa.Table:
        """Encode each row as one token row; columns of tokens end with `_ids`.

        Args:
            rows: rows with the `columns` that the file has.
            places: file and number of each row, for errors.

        Raises:
            ValueError: a row cannot be learnt; the sentence begins with its place.
        """

    @cached_property
    def special(self) -> SpecialTokens:
        """The special tokens of the tokenizer."""
        return special_tokens(self.tokenizer)

    def spellings(self, given: Any, place: str) -> Spellings:
        """Find the special tokens that a conversation spells, and note them."""
        spellings = self.special.spellings(given, f"{place}: ")
        self.omissions.note(spellings.note)
        return spellings

    def check_written(self, messages: Messages, text: str, place: str, start: int = 0, **more: Any) -> None:
        """Refuse a conversation that the template does not write as a whole; see `Omissions.check` and `render`."""
        self.omissions.check(messages, text, lambda some: self.render(some, False, place, **more), place, start)

    def check_answer(self, messages: Messages, text: str, place: str, **more: Any) -> None:
        """Refuse an answer, the last message, that the template does not write as a whole; see `render`."""
        check_answer(messages, text, lambda some: self.render(some, False, place, **more), place)

    def render(self, messages: Messages, generate: bool, place: str, **more: Any) -> str:
        """Render the text of `messages`, followed by the opening of the assistant's next turn if `generate`.

        Args:
            messages: as from `read_messages`.
            generate: whether the assistant's turn is opened.
            place: beginning of the error.
            more: arguments of the template, which override the settings.

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
        """Render as `render` does, with stand-ins."""
        return spellings.render(lambda given: self.render(given[0], generate, place, **given[1]), (messages, more))

    def answer_length(self, part: list[int]) -> int:
        """Count the tokens up to the end of the turn: the policy never generates later tokens of the template."""
        places = [place for place, token in enumerate(part) if token in self.ends]
        if not places:
            return len(part)
        last = places.pop()
        # Some templates end the text after the turn, perhaps after a newline.
        while places and not self.tokenizer.decode(part[places[-1] + 1 : last]).strip():
            last = places.pop()
        return last + 1


def read(group: RowGroup, encoder: RowEncoder[Any], random: np.random.Generator | None) -> Iterator[pa.Table]:
    """Yield the encoded rows of one row group, in slices; shuffled by `random` unless that is None."""
    rows = encoder.whole(_read(group, encoder, group.rows), group)
    order = np.arange(group.rows) if random is None else random.permutation(group.rows)
    for start in range(0, group.rows, SLICE_ROWS):
        part = order[start : start + SLICE_ROWS]
        places = [str(group.file.place(group.number, int(row))) for row in part]
        yield encoder.encode(rows.take(pa.array(part)), places)


def _read(group: RowGroup, encoder: RowEncoder[Any], rows: int) -> pa.Table:
    """Read the first rows of a row group. Raises ValueError if one has images, videos or sound."""
    media = group.file.media
    columns = [name for name in [*encoder.columns(), *media] if name]
    parts = list(group.file.read([Slice(group.number, 0, rows)], columns))
    for part, batch in parts if media else ():
        for number, row in enumerate(values(batch.select(media)), part.start):
            if found := [name for name in media if row[name]]:
                place = group.file.place(group.number, number)
                raise ValueError(f"{place}: the column {found[0]!r} has content, and only text can be trained")
    return pa.Table.from_batches([batch for _, batch in parts]).drop_columns(media)


def notes(groups: list[RowGroup], encoder: RowEncoder[Any]) -> Iterator[str]:
    """Encode the first rows of the files; yields sentences on columns and fields that nothing reads.

    Raises:
        ValueError: one of these rows cannot be learnt.
    """
    first = list({group.file.name: group for group in reversed(groups)}.values())[::-1][:CHECKED_ROWS]
    for group in first:
        rows = encoder.whole(_read(group, encoder, min(group.rows, max(1, CHECKED_ROWS // len(first)))), group)
        encoder.encode(rows, [f"{group.file.key}: {group.file.place(group.number, row)}" for row in range(len(rows))])
        unread = [name for name in group.file.columns if name not in encoder.columns()]
        if unread:
            yield f"{group.file.key}: {group.file.name} has columns that are not read: {', '.join(unread)}"
    yield from encoder.omissions.notes


def held_rows(
    groups: list[RowGroup], encoder: RowEncoder[Any], limit: int, rank: int, world_size: int
) -> pa.Table | None:
    """Hold one rank's share of the first `limit` rows (all if negative) in memory; None without row groups."""
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
    """The Ray Data stage: numbers of row groups in, token rows out."""

    def __init__(
        self, groups: list[RowGroup], encoder: type[RowEncoder[Any]], model: ModelConfig, data: Any, seed: int
    ) -> None:
        self.groups = groups
        self.seed = seed
        self.encoder = encoder.of(model, data)

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        for epoch, number in zip(batch["epoch"].to_pylist(), batch["group"].to_pylist(), strict=True):
            random = np.random.default_rng([self.seed, epoch, number]) if self.encoder.data.shuffle else None
            yield from read(self.groups[number], self.encoder, random)


def train_dataset(
    groups: list[RowGroup],
    encoder: type[RowEncoder[Any]],
    model: ModelConfig,
    data: SupervisedDataConfig,
    seed: int,
    epochs: int,
    block_rows: int,
) -> ray.data.Dataset:
    """Build one stream of all epochs in blocks of `block_rows` rows (the last may be smaller), in a repeatable
    order."""
    order = []
    for epoch in range(epochs):
        numbers = np.random.default_rng([seed, epoch]).permutation(len(groups)) if data.shuffle else range(len(groups))
        order += [{"epoch": epoch, "group": int(number)} for number in numbers]
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
    """Convert lists of integers to one int64 array each."""
    return [row.values.to_numpy().astype(np.int64) for row in rows]
