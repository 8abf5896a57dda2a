"""Rows as read to rows of the stream: checked, tokenised, their answers as JSON; those that are unusable set aside."""

import datetime
import decimal
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.prompts.chat import ChatTokenizer
from pipeline.prompts.prompt_file import Place
from pipeline.prompts.quarantine import Quarantine
from pipeline.rows import PROMPT
from pipeline.sampling import RowLimits

# Columns that depend on the run and not on the prompt; `stamp` adds them.
STAMPED = ("split", "chunk", "iteration")
MEDIA = ("images", "videos", "audios")
"""Columns of verl's format that hold what a text model cannot read."""
PLACEHOLDERS = ("<image>", "<video>", "<audio>")
"""Marks in a prompt that stand for an entry of those columns."""
COLUMNS = pa.schema([field for field in PROMPT if field.name not in STAMPED])


class Prompt(NamedTuple):
    """A row as read, with the visit it is read for."""

    uid: str
    epoch: int
    offset: int
    place: Place
    prompt_index: int
    """Number of the row in all files, from 0; -1 for one that was generated."""
    values: dict[str, Any]


class Encoder:
    """Makes rows of the stream, and counts what it leaves out."""

    def __init__(self, chat: ChatTokenizer, quarantine: Quarantine, limits: RowLimits | None = None) -> None:
        """
        Args:
            chat: makes tokens of messages.
            quarantine: takes the rows that cannot be used.
            limits: how rows may ask to be sampled; None looks at none of it.
        """
        self.chat = chat
        self.limits = limits
        self.prompt_key = chat.data.prompt_key
        self.quarantine = quarantine
        self.filtered_overlong = 0
        """Prompts left out so far because they are longer than `data.max_prompt_length`."""
        self.truncated = 0
        """Prompts cut so far to `data.max_prompt_length`."""

    def __call__(self, prompts: list[Prompt]) -> list[dict[str, Any]]:
        """Rows of `COLUMNS` of those prompts that can be used, in their order.

        Raises:
            ValueError: more rows are bad than `data.max_bad_rows` allows.
        """
        return list(self._rows(prompts))

    def _rows(self, prompts: list[Prompt]) -> Iterator[dict[str, Any]]:
        try:
            together: list[list[int]] | None = self._tokens(prompts)
        except ValueError:
            # One of them is bad; alone, each shows what it is.
            together = None
        for number, prompt in enumerate(prompts):
            try:
                check_text_only(prompt.values, self.prompt_key, prompt.place)
                ids = together[number] if together is not None else self._tokens([prompt])[0]
                row = self._row(prompt, ids)
            except ValueError as error:
                self.quarantine.add(prompt.place, prompt.values, error)
                continue
            if row is not None:
                yield row

    def _tokens(self, prompts: list[Prompt]) -> list[list[int]]:
        return self.chat.encode([p.values.get(self.prompt_key) for p in prompts], [p.place for p in prompts])

    def _row(self, prompt: Prompt, ids: list[int]) -> dict[str, Any] | None:
        place, values = prompt.place, prompt.values
        row = {
            "uid": prompt.uid,
            "epoch": prompt.epoch,
            "offset": prompt.offset,
            "prompt_index": prompt.prompt_index,
            "data_source": data_source(values, place),
            "prompt": to_json(values[self.prompt_key], place, self.prompt_key),
            "ground_truth": to_json(_ground_truth(values, place), place, "reward_model.ground_truth"),
            "extra_info": to_json({} if (info := values.get("extra_info")) is None else info, place, "extra_info"),
        }
        if self.limits is not None:
            try:
                self.limits.check(values.get("extra_info"))
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
        fitted = self.chat.fit(ids, place)
        if fitted is None:
            self.filtered_overlong += 1
            return None
        self.truncated += len(fitted) < len(ids)
        return row | {"prompt_ids": fitted}


def check_text_only(values: dict[str, Any], prompt_key: str, place: Place) -> None:
    """Refuse a row with images, videos or sound: training on them is not supported.

    Args:
        values: the row as read.
        prompt_key: name of the column with the messages.
        place: file and row, for the message.

    Raises:
        ValueError: a media column has content, or the prompt holds a placeholder such as `<image>`.
    """
    for name in MEDIA:
        if values.get(name) is not None and len(values[name]) > 0:
            raise ValueError(
                f"{place}: the column `{name}` has content, and only text can be trained; leave the row out"
            )
    messages = values.get(prompt_key)
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        for placeholder in PLACEHOLDERS:
            if isinstance(content, str) and placeholder in content:
                raise ValueError(
                    f"{place}: `{prompt_key}` holds {placeholder}, and only text can be trained; leave the row out"
                )


def data_source(values: dict[str, Any], place: Place) -> str:
    """The `data_source` of a row.

    Raises:
        ValueError: it has none.
    """
    found = values.get("data_source")
    if not isinstance(found, str):
        what = "null" if found is None else f"{found!r:.80} where text is needed"
        raise ValueError(f"{place}: `data_source` is {what}; every row needs one")
    return found


def _ground_truth(values: dict[str, Any], place: Place) -> Any:
    if "reward_model" not in values:
        raise ValueError(f'{place}: it has no `reward_model`; write {{"ground_truth": the answer}} there')
    reward_model = values["reward_model"]
    if reward_model is None:
        return None
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise ValueError(
            f"{place}: `reward_model` is {reward_model!r:.80} where an object with `ground_truth` is needed; write the "
            "answer there"
        )
    return reward_model["ground_truth"]


def to_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows of `COLUMNS` as Arrow."""
    return pa.table(
        {field.name: pa.array([row[field.name] for row in rows], field.type) for field in COLUMNS}, schema=COLUMNS
    )


def stamp(table: pa.Table, split: str, chunk: int, iteration: int | None) -> pa.Table:
    """A chunk with all columns of `rows.PROMPT`: split, chunk and iteration are the same in every row.

    With dynamic sampling `iteration` is null until the filter stage knows it.
    """
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
    except (TypeError, ValueError, RecursionError) as error:
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
