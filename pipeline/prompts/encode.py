"""Rows of prompt files to rows of the stream: checked, tokenised, answers as JSON. Unusable rows are set aside."""

import datetime
import decimal
import json
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.cells import parsed, plain
from pipeline.conversations import begun_answer
from pipeline.prompts.chat import ChatTokenizer
from pipeline.prompts.parquet import MEDIA, Place
from pipeline.prompts.quarantine import Quarantine
from pipeline.rows import PROMPT
from pipeline.sampling import RowLimits

COLUMNS = pa.schema([field for field in PROMPT if field.name not in ("split", "chunk", "iteration")])
"""Columns that depend only on the prompt; `stamp` adds the other columns."""


class Prompt(NamedTuple):
    """A row as read, with its visit."""

    uid: str
    epoch: int
    offset: int
    place: Place
    prompt_index: int
    """Number of the row in all files, from 0; -1 for a generated row."""
    values: dict[str, Any]


class PromptEncoder:
    """Encoder of rows of the stream, which counts the rows that it leaves out."""

    def __init__(self, chat: ChatTokenizer, quarantine: Quarantine, limits: RowLimits | None = None) -> None:
        """Store the parts; `limits` are the sampling requests that rows may make, None skips their check."""
        self.chat = chat
        self.limits = limits
        self.prompt_key = chat.data.prompt_key
        self.quarantine = quarantine
        self.media = set(MEDIA)
        """Columns of images, videos or sound."""
        self.filtered_overlong = 0
        """Prompts left out so far because they are longer than `data.max_prompt_length`."""
        self.truncated = 0
        """Prompts cut so far to `data.max_prompt_length`."""

    def __call__(self, prompts: list[Prompt]) -> list[dict[str, Any]]:
        """Encode the usable `prompts` as rows of `COLUMNS`, in their order.

        Raises:
            ValueError: more rows are bad than `data.max_bad_rows` allows.
        """
        messages = [prompt.values.get(self.prompt_key) for prompt in prompts]
        try:
            together: list[list[int]] | None = self.chat.encode(messages)
        except ValueError:
            # One of them is bad. Each is encoded again by itself to find it.
            together = None
        rows = []
        for number, prompt in enumerate(prompts):
            try:
                check_text_only(prompt.values, self.media)
                ids = together[number] if together is not None else self.chat.encode([messages[number]])[0]
                row = self._row(prompt, ids)
            except ValueError as error:
                self.quarantine.add(prompt.place, prompt.values, error)
                continue
            if row is not None:
                rows.append(row)
        return rows

    def _row(self, prompt: Prompt, ids: list[int]) -> dict[str, Any] | None:
        values = prompt.values
        extra_info = values.get("extra_info")
        source, truth = data_source(values), to_json(ground_truth_of(values), "reward_model.ground_truth")
        messages = self.chat.read(values[self.prompt_key])
        row = {
            "uid": prompt.uid,
            "epoch": prompt.epoch,
            "offset": prompt.offset,
            "prompt_index": prompt.prompt_index,
            "data_source": source,
            "prompt": to_json(messages, self.prompt_key),
            "ground_truth": truth,
            "extra_info": to_json({} if extra_info is None else extra_info, "extra_info"),
            "agent_name": values.get("agent_name"),
        }
        if self.limits is not None:
            self.limits.check(extra_info)
            self.limits.check_agent(values.get("agent_name"))
            if begun_answer(messages) is not None:
                self.limits.check_asks(values.get("agent_name"))
            # In the form that the reward will read.
            self.limits.truths(source, values.get("agent_name"), json.loads(truth))
        fitted = self.chat.fit(ids)
        if fitted is None:
            self.filtered_overlong += 1
            return None
        self.truncated += len(fitted) < len(ids)
        return row | {"prompt_ids": fitted}


def structured(values: dict[str, Any], prompt_key: str) -> dict[str, Any]:
    """Parse the columns of a row that must hold a list or an object, if they are JSON text.

    Raises:
        ValueError: one of them is another text.
    """
    columns = [name for name in (prompt_key, "reward_model", "extra_info") if name in values]
    return values | {name: parsed(values[name], f"column {name!r}") for name in columns}


def check_text_only(values: dict[str, Any], media: Collection[str]) -> None:
    """Refuse a row, as read, with images, videos or sound: training on them is not supported.

    Raises:
        ValueError: a media column has content.
    """
    for name in sorted(media):
        if plain(values.get(name)):
            raise ValueError(f"the column `{name}` has content, and only text can be trained; leave the row out")


def data_source(values: dict[str, Any]) -> str:
    """Return the `data_source` of a row. Raises ValueError if it has none."""
    found = values.get("data_source")
    if not isinstance(found, str):
        what = "null" if found is None else f"{found!r:.80} instead of text"
        raise ValueError(f"`data_source` is {what}; every row needs one")
    return found


def ground_truth_of(values: dict[str, Any]) -> Any:
    """Return the ground truth of a row, as read. Raises ValueError if it has no place for one."""
    if "reward_model" not in values:
        raise ValueError('it has no `reward_model`; write {"ground_truth": the answer} there')
    reward_model = values["reward_model"]
    # A struct without its only field is read as null.
    if not reward_model and reward_model in (None, {}):
        return None
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise ValueError(
            f"`reward_model` is {reward_model!r:.80} instead of an object with `ground_truth`; write the answer there"
        )
    return reward_model["ground_truth"]


def to_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Convert rows of `COLUMNS` to Arrow."""
    return pa.Table.from_pylist(rows, COLUMNS)


def stamp(table: pa.Table, split: str, chunk: int, iteration: int | None) -> pa.Table:
    """Add the columns of `rows.PROMPT` that all rows of a chunk share: split, chunk and iteration.

    With dynamic sampling `iteration` is null until the filter stage knows it.
    """
    for name, value in {"split": split, "chunk": chunk, "iteration": iteration}.items():
        table = table.append_column(name, pa.repeat(pa.scalar(value, PROMPT.field(name).type), len(table)))
    return pa.table(table.select(PROMPT.names).columns, schema=PROMPT)


def to_json(value: Any, column: str) -> str:
    """Convert `value` to JSON. Exact decimals become numbers if a float holds them, else text; dates are ISO 8601.

    Raises:
        ValueError: the value holds bytes or something else that JSON cannot hold.
    """
    try:
        return json.dumps(value, default=_plain, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"column {column!r} cannot be written as JSON: {error}; store numbers, text, lists or structs"
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
