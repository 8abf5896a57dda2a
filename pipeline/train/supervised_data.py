"""Rows in parquet to token rows, as a Ray Data stream.

1. The unit of work is a row group. Its place in the order, and that of the rows within it, follow from seed and epoch
   alone, so a run repeats itself on any number of workers. Only footers are read up front.
2. No row is ever left out, so the number of steps is known before the first is read. One without anything to learn
   stays in, and nothing is learnt from it.
"""

import glob
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import ray.data

from pipeline.prompts.chat import load_tokenizer
from pipeline.train.config import ModelConfig
from pipeline.train.supervised_config import SupervisedDataConfig

SLICE_ROWS = 2048

D = TypeVar("D", bound=SupervisedDataConfig)


@dataclass(frozen=True)
class RowGroup:
    """One row group of one file, read where it is needed."""

    fragment: Any
    """`pyarrow.dataset.ParquetFileFragment` of this row group alone."""
    file: str
    first_row: int
    """Number of its first row in the file."""
    rows: int


def find_row_groups(paths: Any, config_key: str, problem: Callable[[pa.Schema], str | None]) -> list[RowGroup]:
    """The row groups of all files that `paths` names, in order.

    Args:
        paths: value of the setting.
        config_key: its name, for errors.
        problem: what is wrong with the columns of a file, to stand behind the file's name; None if they will do.

    Raises:
        ValueError: a path names nothing, a file is not parquet, has no rows, or has a problem.
    """
    if not paths:
        raise ValueError(f"{config_key} is not set; give parquet files.")
    found: list[RowGroup] = []
    for path in [paths] if isinstance(paths, str) else list(paths):
        matches = sorted(glob.glob(path)) if "://" not in path and glob.has_magic(path) else [path]
        if not matches:
            raise ValueError(f"{config_key}: no file matches {path}; check the pattern.")
        for match in matches:
            found += _of_path(match, config_key, problem)
    return found


def _of_path(path: str, config_key: str, problem: Callable[[pa.Schema], str | None]) -> list[RowGroup]:
    try:
        fragments = list(pa.dataset.dataset(path, format="parquet").get_fragments())
        groups = [(fragment, fragment.split_by_row_group()) for fragment in fragments]
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{config_key}: {path} cannot be read as parquet: {error}") from error
    found: list[RowGroup] = []
    for fragment, parts in groups:
        if words := problem(fragment.physical_schema):
            raise ValueError(f"{config_key}: {fragment.path} {words}")
        counts = [part.row_groups[0].num_rows for part in parts]
        starts = itertools.accumulate([0, *counts[:-1]])
        found += [
            RowGroup(part, fragment.path, start, rows) for part, start, rows in zip(parts, starts, counts, strict=True)
        ]
    if not sum(group.rows for group in found):
        raise ValueError(f"{config_key}: {path} has no rows.")
    return [group for group in found if group.rows]


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type can hold chat messages."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


class Encoder(ABC, Generic[D]):
    """Turns rows of a file into token rows, with the model's chat template.

    Args:
        tokenizer: of the model.
        data: `data.*`.
    """

    truncations: ClassVar[tuple[str, ...]]
    """What `data.truncation` may be."""

    def __init__(self, tokenizer: Any, data: D) -> None:
        self.tokenizer, self.data = tokenizer, data

    @staticmethod
    @abstractmethod
    def problem(schema: pa.Schema, data: Any) -> str | None:
        """What is wrong with the columns of a file, to stand behind its name; None if they will do."""

    @abstractmethod
    def columns(self, names: list[str]) -> list[str]:
        """Those of a file's columns that `encode` reads."""

    @abstractmethod
    def encode(self, rows: pa.Table, places: list[str]) -> pa.Table:
        """One token row per row.

        Args:
            rows: with the `columns`.
            places: where each stands, for errors.

        Raises:
            ValueError: a row cannot be learnt; the sentence names its place.
        """

    def render(self, messages: list[dict[str, Any]], generate: bool, place: str) -> str:
        """The text of `messages`, with the opening of the assistant's next turn if `generate`.

        Raises:
            ValueError: the template fails.
        """
        # A template is foreign code and may raise anything.
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=generate, **self.data.apply_chat_template_kwargs
                )
            )
        except Exception as error:
            raise ValueError(f"{place}: the model's chat template fails: {type(error).__name__}: {error}") from error

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Tokens of rendered texts: the template has written the special ones itself."""
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return list(encoded["input_ids"])


def without_nulls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A parquet struct has every field in every row; templates ask whether a field is there."""
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def read(group: RowGroup, encoder: Encoder[Any], random: np.random.Generator | None) -> Iterator[pa.Table]:
    """Encoded rows of one row group, in slices; mixed by `random` where given."""
    columns = encoder.columns(list(group.fragment.physical_schema.names))
    rows = group.fragment.to_table(columns=columns)
    order = np.arange(group.rows) if random is None else random.permutation(group.rows)
    for start in range(0, group.rows, SLICE_ROWS):
        part = order[start : start + SLICE_ROWS]
        places = [f"{group.file}, row {group.first_row + int(row)}" for row in part]
        yield encoder.encode(rows.take(pa.array(part)), places)


def held_rows(groups: list[RowGroup], encoder: Encoder[Any], limit: int, rank: int, world_size: int) -> pa.Table | None:
    """One rank's share of the first `limit` rows (negative: of all) in memory; None without row groups."""
    if not groups:
        return None
    seen, tables = 0, []
    for group in groups:
        for table in read(group, encoder, None):
            if limit >= 0:
                table = table.slice(0, max(0, limit - seen))
            mine = [row for row in range(len(table)) if (seen + row) % world_size == rank]
            tables.append(table.take(pa.array(mine, pa.int64())))
            seen += len(table)
        if 0 <= limit <= seen:
            break
    return pa.concat_tables(tables)


class Reader:
    """The Ray Data stage: names of row groups in, token rows out."""

    def __init__(
        self, groups: list[RowGroup], encoder: type[Encoder[Any]], model: ModelConfig, data: Any, seed: int
    ) -> None:
        self.groups, self.shuffle, self.seed = groups, data.shuffle, seed
        self.encoder = encoder(load_tokenizer(model), data)

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        for epoch, number in zip(batch["epoch"].to_pylist(), batch["group"].to_pylist(), strict=True):
            random = np.random.default_rng([self.seed, epoch, number]) if self.shuffle else None
            yield from read(self.groups[number], self.encoder, random)


def train_dataset(
    groups: list[RowGroup],
    encoder: type[Encoder[Any]],
    model: ModelConfig,
    data: SupervisedDataConfig,
    seed: int,
    epochs: int,
    block_rows: int,
) -> ray.data.Dataset:
    """All epochs as one stream of blocks of `block_rows` rows (the last may be smaller), in a repeatable order."""
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
