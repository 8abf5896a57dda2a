"""Convert rows of prompt files to rows of the pipeline's stream: check and tokenise them, and write ground truths as
JSON. Unusable rows are left out and recorded in the quarantine folder."""

import datetime
import decimal
import json
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.cells import parsed, plain
from pipeline.conversations import begun_answer
from pipeline.models.processor import Vision
from pipeline.prompts.chat import ChatTokenizer
from pipeline.prompts.images import read_images
from pipeline.prompts.parquet import MEDIA, Place
from pipeline.prompts.quarantine import Quarantine
from pipeline.rows import IMAGES, PROMPT, prompt_columns
from pipeline.sampling import RowLimits
from pipeline.teachers import TeacherRows, taught

COLUMNS = pa.schema([field for field in PROMPT if field.name not in ("split", "chunk", "iteration")])
"""Columns of the stream that depend only on the prompt. `stamp` adds the columns `split`, `chunk` and `iteration`."""


class Prompt(NamedTuple):
    """A row of a prompt file as read, at one of its visits (one per epoch)."""

    uid: str
    epoch: int
    offset: int
    """Number of rows before this one in the order of the epoch."""
    place: Place
    prompt_index: int
    """Number of the row over all files, from 0; -1 for a generated row."""
    values: dict[str, Any]
    """Columns of the row."""


class PromptEncoder:
    """Convert prompts to rows of the stream, and count the prompts that are left out or cut."""

    def __init__(
        self,
        chat: ChatTokenizer,
        quarantine: Quarantine,
        limits: RowLimits | None = None,
        vision: Vision | None = None,
    ) -> None:
        """Store the parts.

        Args:
            chat: converts messages to tokens.
            quarantine: records unusable rows.
            limits: checks what rows request (sampling settings, agents, ground truths); None skips this check.
            vision: processor of the images in `data.image_key`; None refuses rows with images.
        """
        self.chat = chat
        self.limits = limits
        self.vision = vision
        self.prompt_key = chat.data.prompt_key
        self.quarantine = quarantine
        self.columns = COLUMNS if vision is None else pa.schema([*COLUMNS, *IMAGES])
        """Columns of the rows."""
        self.media = {*MEDIA, chat.data.image_key}
        """Names of columns that hold images, videos or sound."""
        self.filtered_overlong = 0
        """Number of prompts left out so far because they are longer than `data.max_prompt_length`."""
        self.truncated = 0
        """Number of prompts cut to `data.max_prompt_length` so far."""

    def __call__(self, prompts: list[Prompt]) -> list[dict[str, Any]]:
        """Convert `prompts` to rows with the columns `columns`, in the same order. Unusable prompts are left out.

        Raises:
            ValueError: more rows are bad than `data.max_bad_rows` allows.
        """
        try:
            together: list[_Encoded] | None = self._encode(prompts)
        except ValueError:
            # One of the prompts is unusable. Each is encoded again by itself to find it.
            together = None
        rows = []
        for number, prompt in enumerate(prompts):
            try:
                row = self._row(prompt, *(together[number] if together is not None else self._encode([prompt])[0]))
            except ValueError as error:
                self.quarantine.add(prompt.place, prompt.values, error)
                continue
            if row is not None:
                rows.append(row)
        return rows

    def _encode(self, prompts: list[Prompt]) -> list["_Encoded"]:
        """Return (prompt tokens with one placeholder for each image, encoded images) of each prompt."""
        shown = {self.chat.data.image_key} if self.vision else set()
        for prompt in prompts:
            check_text_only(prompt.values, self.media - shown)
        images = [read_images(prompt.values, prompt.place.file, self.chat.data) if shown else [] for prompt in prompts]
        ids = self.chat.encode([prompt.values.get(self.prompt_key) for prompt in prompts], [len(one) for one in images])
        return list(zip(ids, images, strict=True))

    def _check_teacher(self, teachers: TeacherRows, row: dict[str, Any], extra_info: Any) -> None:
        """Check that a row has a teacher, and that the prompt that the teacher reads can be written and fits.

        Raises:
            ValueError: it has none, or the prompt cannot be written or is too long.
        """
        name = teachers.check(row["data_source"], row["agent_name"], extra_info)
        if (template := teachers.prompts.get(name)) is None:
            return
        messages = taught(template, json.loads(row["prompt"]), json.loads(row["ground_truth"]), extra_info or {})
        (ids,) = self.chat.encode([messages], [0])
        tokens, most = len(ids) + self.chat.data.max_response_length, teachers.longest[name]
        if tokens > most:
            raise ValueError(
                f"the teacher's prompt has {len(ids)} tokens, and with data.max_response_length="
                f"{self.chat.data.max_response_length} more than the {most} of the teacher's max_token_len; raise that"
            )

    def _row(self, prompt: Prompt, ids: list[int], images: list[bytes]) -> dict[str, Any] | None:
        values = prompt.values
        extra_info = values.get("extra_info")
        source, truth = data_source(values), to_json(ground_truth_of(values), "reward_model.ground_truth")
        messages = self.chat.read(values[self.prompt_key], len(images))
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
            if self.limits.teachers is not None:
                self._check_teacher(self.limits.teachers, row, extra_info)
            if begun_answer(messages) is not None:
                self.limits.check_asks(values.get("agent_name"))
            # The ground truth is checked in the form in which the reward function will get it.
            self.limits.truths(source, values.get("agent_name"), json.loads(truth))
        expanded = self.vision.expand(ids, images) if self.vision else ids
        fitted = self.chat.fit(expanded)
        if fitted is None:
            self.filtered_overlong += 1
            return None
        self.truncated += len(fitted) < len(expanded)
        row["prompt_ids"] = fitted
        if self.vision:
            row |= {"images": images, "image_hash": [self.vision.hash(image) for image in images]}
            row["engine_prompt_ids"] = ids
        return row


_Encoded = tuple[list[int], list[bytes]]


def first_prompt(table: pa.Table, encoder: PromptEncoder) -> list[tuple[str, str]]:
    """Return lines (name, text) on the first prompt of `table`: its text, with one placeholder for each image, and its
    images."""
    vision = encoder.vision
    ids = table["prompt_ids" if vision is None else "engine_prompt_ids"][0].as_py()
    lines = [("first prompt", str(encoder.chat.tokenizer.decode(ids)))]
    if vision is not None and (images := table["images"][0].as_py()):
        lines.append(("its images", "; ".join(map(vision.describe, images))))
    return lines


def structured(values: dict[str, Any], prompt_key: str) -> dict[str, Any]:
    """Parse the prompt, `reward_model` and `extra_info` of a row if they are JSON text.

    Args:
        values: columns of the row as read.
        prompt_key: column of the prompt.

    Raises:
        ValueError: one of these columns is text that is not JSON of a list or an object.
    """
    columns = [name for name in (prompt_key, "reward_model", "extra_info") if name in values]
    return values | {name: parsed(values[name], f"column {name!r}") for name in columns}


def check_text_only(values: dict[str, Any], media: Collection[str]) -> None:
    """Refuse a row with images, videos or sound that the run cannot train on.

    Args:
        values: columns of the row as read.
        media: names of columns that hold images, videos or sound.

    Raises:
        ValueError: one of these columns has content.
    """
    for name in sorted(media):
        if plain(values.get(name)):
            raise ValueError(f"the column `{name}` has content, and only text can be trained; leave the row out")


def data_source(values: dict[str, Any]) -> str:
    """Return the `data_source` of a row. Raises ValueError if it is missing or not text."""
    found = values.get("data_source")
    if not isinstance(found, str):
        what = "null" if found is None else f"{found!r:.80} instead of text"
        raise ValueError(f"`data_source` is {what}; every row needs one")
    return found


def ground_truth_of(values: dict[str, Any]) -> Any:
    """Return the ground truth of a row, as read. Raises ValueError if `reward_model` is not an object with the field
    `ground_truth`."""
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


def to_table(rows: list[dict[str, Any]], columns: pa.Schema = COLUMNS) -> pa.Table:
    """Convert rows with the columns `columns` to an Arrow table."""
    return pa.Table.from_pylist(rows, columns)


def stamp(table: pa.Table, split: str, chunk: int, iteration: int | None) -> pa.Table:
    """Return the rows of one chunk with the columns `split`, `chunk` and `iteration` added, each with a single value.

    `iteration` is None with dynamic sampling, since only the filter stage knows it. `rows.PROMPT` describes the values.
    """
    for name, value in {"split": split, "chunk": chunk, "iteration": iteration}.items():
        table = table.append_column(name, pa.repeat(pa.scalar(value, PROMPT.field(name).type), len(table)))
    schema = prompt_columns(IMAGES.names[0] in table.column_names)
    return pa.table(table.select(schema.names).columns, schema=schema)


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
