"""Encoding of preference pairs for a reward model: both sides of each pair as rows of tokens.

Each side is rendered as a whole conversation, without the opening of a further message, as in the reward-model stage of
a run.
"""

import math
from contextlib import suppress
from typing import Any

import pyarrow as pa

from pipeline.cells import from_json, values
from pipeline.config.supervised import PairDataConfig, PreferenceDataConfig
from pipeline.conversations import Messages, begun_answer, may_be_messages, read_messages
from pipeline.rows import INTS
from pipeline.supervised.data import RowEncoder

SCHEMA = pa.schema([("chosen_ids", INTS), ("rejected_ids", INTS), ("margin", pa.float32())])
"""Columns of an encoded pair: token ids of both sides, and the margin. A pair that is left out has no tokens."""


class PreferenceEncoder(RowEncoder[PreferenceDataConfig]):
    """Encoder that turns pairs into rows of `SCHEMA`."""

    @staticmethod
    def check(schema: pa.Schema, where: str, data: PreferenceDataConfig) -> None:
        check_sides(schema, where, data)
        if key := data.margin_key:
            kind = _column(schema, where, key, "margin_key")
            if not pa.types.is_integer(kind) and not pa.types.is_floating(kind):
                raise ValueError(f"{where} has a column {key!r} of type {kind} instead of numbers.")

    def columns(self) -> list[str | None]:
        return [self.data.prompt_key, self.data.chosen_key, self.data.rejected_key, self.data.margin_key]

    def encode(self, rows: pa.Table, places: list[str]) -> pa.Table:
        data, cells = self.data, list(values(rows, places))
        prompts: list[Messages | None] = [None] * len(rows)
        if (key := data.prompt_key) is not None and key in rows.column_names:
            pairs = zip(cells, places, strict=True)
            prompts = [prompt_messages(row[key], f"{place}, column {key!r}") for row, place in pairs]
        chosen = self._side(cells, data.chosen_key, prompts, places)
        rejected = self._side(cells, data.rejected_key, prompts, places)
        margins = rows[data.margin_key].to_pylist() if data.margin_key else [0.0] * len(rows)
        for row, (margin, place) in enumerate(zip(margins, places, strict=True)):
            check_margin(margin, f"{place}, column {data.margin_key!r}")
            if max(len(chosen[row]), len(rejected[row])) > data.max_length:
                chosen[row], rejected[row] = [], []
        return pa.table([chosen, rejected, pa.array(margins, pa.float32())], schema=SCHEMA)

    def _side(
        self, rows: list[dict[str, Any]], key: str, prompts: list[Messages | None], places: list[str]
    ) -> list[list[int]]:
        """Encode one side of each pair. Returns the token ids of each conversation.

        Args:
            rows: the cells of each row.
            key: column of the side.
            prompts: prompt of each row, None if the side has it.
            places: file and number of each row, for errors.
        """
        limit = self.data.max_length
        places = [f"{place}, column {key!r}" for place in places]
        texts, spellings = [], []
        for row, prompt, place in zip(rows, prompts, places, strict=True):
            messages = cell_messages(row[key], "assistant", place)
            first = messages[0]["role"]
            last = messages[-1]["role"]
            if last != "assistant":
                raise ValueError(f"{place}: the last message is of role {last!r}, not the assistant's answer.")
            if prompt is None and first == "assistant":
                raise ValueError(
                    f"{place}: the conversation begins with the assistant; if the prompt has its own column, name it "
                    "with data.prompt_key."
                )
            if prompt is not None and first in ("system", "user"):
                raise ValueError(
                    f"{place}: the answer begins with a message of role {first!r}; if the column holds the whole "
                    "conversation, set data.prompt_key=null."
                )
            conversation = [*(prompt or ()), *messages]
            spelled = self.spellings(conversation, place)
            text = self.write(spelled, conversation, False, place)
            texts.append(text)
            spellings.append(spelled)
            self.check_written(conversation, spelled.show(text), place)
            self.check_answer(conversation, spelled.show(text), place)
        tokens = self.special.encode(texts, spellings)
        for ids, place in zip(tokens, places, strict=True):
            if not ids:
                raise ValueError(f"{place}: the model's chat template makes an empty text of the conversation.")
            if len(ids) > limit and self.data.truncation == "error":
                raise ValueError(
                    f"{place}: the conversation has {len(ids)} tokens, more than data.max_length={limit}; raise it or "
                    "set data.truncation=left or data.truncation=drop."
                )
        return [ids[-limit:] for ids in tokens] if self.data.truncation == "left" else tokens


def check_sides(schema: pa.Schema, where: str, data: PairDataConfig) -> None:
    """Check that a file has the columns of pairs, with messages or text.

    Args:
        schema: columns of the file.
        where: beginning of errors, which names the file.
        data: settings with the names of the columns.

    Raises ValueError if a column is missing or has another type.
    """
    for setting in ("chosen_key", "rejected_key", "prompt_key"):
        key = getattr(data, setting)
        if setting == "prompt_key" and key not in schema.names:
            continue
        kind = _column(schema, where, key, setting)
        if not may_be_messages(kind):
            raise ValueError(
                f"{where} has a column {key!r} of type {kind} instead of a list of {{role, content}} or text."
            )


def _column(schema: pa.Schema, where: str, key: str, setting: str) -> pa.DataType:
    """Return the type of the column `key`, which the setting `data.<setting>` names.

    Raises:
        ValueError: the column does not exist.
    """
    if key not in schema.names:
        names = ", ".join(schema.names)
        raise ValueError(f"{where} has no column {key!r}, but {names}; name it with data.{setting}.")
    return schema.field(key).type


def check_margin(margin: float | None, place: str) -> None:
    """Raise ValueError, with `place` (file, row and column) at its beginning, if a margin is not a finite number."""
    if margin is None or not math.isfinite(margin):
        raise ValueError(f"{place}: the margin is {margin}, not a finite number.")


def cell_messages(value: Any, role: str, place: str) -> Messages:
    """Read the cell of a column as chat messages.

    Args:
        value: messages, or text: either the JSON of messages, or the content of a single message.
        role: role of that single message.
        place: file, row and column, for errors.
    """
    if isinstance(value, str):
        found: Any = None
        with suppress(ValueError):
            found = from_json(value)
        is_list = isinstance(found, list) and bool(found)
        if not is_list or not all(isinstance(message, dict) and "role" in message for message in found):
            return [{"role": role, "content": value}]
        value = found
    return read_messages(value, place)


def prompt_messages(value: Any, place: str) -> Messages:
    """Read the cell of a column as the messages of a prompt. Plain text becomes one message of the user.

    Raises ValueError, with `place` at its beginning, if the last message is the assistant's.
    """
    messages = cell_messages(value, "user", place)
    if begun_answer(messages) is not None:
        raise ValueError(
            f"{place}: the last message of the prompt is the assistant's, so the answers would be a second turn; move "
            "it into the answers, or remove it."
        )
    return messages
