"""Conversations in parquet to token rows, as a Ray Data stream.

1. The unit of work is a row group. Its place in the order, and that of the rows within it, follow from seed and epoch
   alone, so a run repeats itself on any number of workers. Only footers are read up front.
2. Prompt and answer are tokenised apart, as they are when the policy generates: a token never spans the border.
3. One row is `input_ids` and `loss_mask` of equal length, 1 where the token is the assistant's.
4. No row is ever left out, so the number of steps is known before the first is read. A row without a token to learn
   stays in with a zero mask.
"""

import glob
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import ray.data

from pipeline.prompts.chat import load_tokenizer
from pipeline.rows import INTS
from pipeline.train.config import ModelConfig
from pipeline.train.sft_config import SFTDataConfig

SCHEMA = pa.schema([("input_ids", INTS), ("loss_mask", pa.list_(pa.int8()))])
SLICE_ROWS = 2048


@dataclass(frozen=True)
class RowGroup:
    """One row group of one file, read where it is needed."""

    fragment: Any
    """`pyarrow.dataset.ParquetFileFragment` of this row group alone."""
    file: str
    first_row: int
    """Number of its first row in the file."""
    rows: int


def row_groups(paths: Any, config_key: str, messages_key: str) -> list[RowGroup]:
    """The row groups of all files that `paths` names, in order.

    Raises:
        ValueError: a path names nothing, a file is not parquet, has no rows, or lacks the column.
    """
    if not paths:
        raise ValueError(f"{config_key} is not set; give parquet files of conversations.")
    found: list[RowGroup] = []
    for path in [paths] if isinstance(paths, str) else list(paths):
        matches = sorted(glob.glob(path)) if "://" not in path and glob.has_magic(path) else [path]
        if not matches:
            raise ValueError(f"{config_key}: no file matches {path}; check the pattern.")
        for match in matches:
            found += _of_path(match, config_key, messages_key)
    return found


def _of_path(path: str, config_key: str, messages_key: str) -> list[RowGroup]:
    try:
        fragments = list(pa.dataset.dataset(path, format="parquet").get_fragments())
        groups = [(fragment, fragment.split_by_row_group()) for fragment in fragments]
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{config_key}: {path} cannot be read as parquet: {error}") from error
    found: list[RowGroup] = []
    for fragment, parts in groups:
        kind = fragment.physical_schema.field(messages_key).type if messages_key in _names(fragment) else None
        if kind is None:
            raise ValueError(
                f"{config_key}: {fragment.path} has no column {messages_key!r}, but {', '.join(_names(fragment))}; "
                "name the column of chat messages with data.messages_key."
            )
        if not pa.types.is_list(kind) and not pa.types.is_large_list(kind):
            raise ValueError(
                f"{config_key}: {fragment.path}: column {messages_key!r} is of type {kind} where a list of "
                "{role, content} is needed."
            )
        counts = [part.row_groups[0].num_rows for part in parts]
        starts = itertools.accumulate([0, *counts[:-1]])
        found += [
            RowGroup(part, fragment.path, start, rows) for part, start, rows in zip(parts, starts, counts, strict=True)
        ]
    if not sum(group.rows for group in found):
        raise ValueError(f"{config_key}: {path} has no rows.")
    return [group for group in found if group.rows]


def _names(fragment: Any) -> list[str]:
    return list(fragment.physical_schema.names)


class Encoder:
    """Turns conversations into `input_ids` and `loss_mask`."""

    def __init__(self, tokenizer: Any, data: SFTDataConfig) -> None:
        self.tokenizer, self.data = tokenizer, data

    def __call__(self, conversations: list[Any], places: list[str]) -> pa.Table:
        """Rows of `SCHEMA`, one per conversation.

        Args:
            conversations: lists of messages {role, content}.
            places: where each stands, for messages.

        Raises:
            ValueError: a conversation is not a list of messages, has no assistant message, fails in the chat template,
                or is too long under `data.truncation=error`.
        """
        segments = [self._segments(messages, place) for messages, place in zip(conversations, places, strict=True)]
        texts = [text for row in segments for text, _ in row]
        tokens = iter(self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"])
        ids, masks = [], []
        for row, place in zip(segments, places, strict=True):
            row_ids: list[int] = []
            row_mask: list[int] = []
            for _, learnt in row:
                part = next(tokens)
                row_ids += part
                row_mask += [int(learnt)] * self._answer_length(part) + [0] * (len(part) - self._answer_length(part))
            limit = self.data.max_length
            if len(row_ids) > limit and self.data.truncation == "error":
                raise ValueError(
                    f"{place}: the conversation has {len(row_ids)} tokens, more than data.max_length={limit}; raise it "
                    "or set data.truncation=right."
                )
            ids.append(row_ids[:limit])
            masks.append(row_mask[:limit])
        return pa.table([pa.array(ids, INTS), pa.array(masks, pa.list_(pa.int8()))], schema=SCHEMA)

    def _answer_length(self, part: list[int]) -> int:
        """Tokens up to the last end of turn: what templates write after it is never generated."""
        end = self.tokenizer.eos_token_id
        backwards = part[::-1]
        return len(part) - backwards.index(end) if end in backwards else len(part)

    def _segments(self, messages: Any, place: str) -> list[tuple[str, bool]]:
        """The rendered conversation as (text, learnt) in order."""
        good = isinstance(messages, list) and all(isinstance(m, dict) and m.get("role") for m in messages)
        if not good or not any(m["role"] == "assistant" for m in messages):
            raise ValueError(f"{place}: {str(messages)[:200]} is not a list of messages with one of the assistant.")
        # A parquet struct has every field in every row; templates ask whether a field is there.
        messages = [{name: value for name, value in m.items() if value is not None} for m in messages]
        segments: list[tuple[str, bool]] = []
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:number], True, place)
            whole = self._render(messages[: number + 1], False, place)
            if not prompt.startswith(done) or not whole.startswith(prompt):
                raise ValueError(
                    f"{place}: the chat template writes earlier messages anew at message {number}, so its tokens "
                    "cannot be told apart; split the conversation into one row per answer."
                )
            segments += [(prompt[len(done) :], False), (whole[len(prompt) :], True)]
            done = whole
        return segments

    def _render(self, messages: list[dict[str, Any]], generate: bool, place: str) -> str:
        # A template is foreign code and may raise anything.
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=generate, **self.data.apply_chat_template_kwargs
                )
            )
        except Exception as error:
            raise ValueError(f"{place}: the model's chat template fails: {type(error).__name__}: {error}") from error


def read(group: RowGroup, encoder: Encoder, key: str, random: np.random.Generator | None) -> Iterator[pa.Table]:
    """Encoded rows of one row group, in slices; mixed by `random` where given."""
    column = group.fragment.to_table(columns=[key])[key]
    order = np.arange(group.rows) if random is None else random.permutation(group.rows)
    for start in range(0, group.rows, SLICE_ROWS):
        part = order[start : start + SLICE_ROWS]
        places = [f"{group.file}, row {group.first_row + int(row)}, column {key!r}" for row in part]
        yield encoder(column.take(pa.array(part)).to_pylist(), places)


class Reader:
    """The Ray Data stage: names of row groups in, token rows out."""

    def __init__(self, groups: list[RowGroup], model: ModelConfig, data: SFTDataConfig, seed: int) -> None:
        self.groups, self.data, self.seed = groups, data, seed
        self.encoder = Encoder(load_tokenizer(model), data)

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        for epoch, number in zip(batch["epoch"].to_pylist(), batch["group"].to_pylist(), strict=True):
            random = np.random.default_rng([self.seed, epoch, number]) if self.data.shuffle else None
            yield from read(self.groups[number], self.encoder, self.data.messages_key, random)


def train_dataset(
    groups: list[RowGroup], model: ModelConfig, data: SFTDataConfig, seed: int, epochs: int, block_rows: int
) -> ray.data.Dataset:
    """All epochs as one stream of blocks of `block_rows` rows (the last may be smaller), in a repeatable order."""
    order = []
    for epoch in range(epochs):
        numbers = np.random.default_rng([seed, epoch]).permutation(len(groups)) if data.shuffle else range(len(groups))
        order += [{"epoch": epoch, "group": int(number)} for number in numbers]
    stream = ray.data.from_items(order, override_num_blocks=len(order)).map_batches(
        Reader,
        fn_constructor_args=(groups, model, data, seed),
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=1,
        udf_modifying_row_count=True,
    )
    return stream.repartition(target_num_rows_per_block=block_rows, strict=True)
