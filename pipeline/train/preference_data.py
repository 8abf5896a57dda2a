"""Preference pairs to token rows.

1. Each side is rendered as a whole conversation by the model's chat template, without the opening of a further turn,
   which is what a reward model is given in a run.
2. One row is `chosen_ids`, `rejected_ids` and the `margin`. A pair that is left out has no tokens.
"""

import math
from typing import Any

import pyarrow as pa

from pipeline.rows import INTS
from pipeline.train import supervised_data
from pipeline.train.preference_config import PreferenceDataConfig
from pipeline.train.supervised_data import is_list, without_nulls

SCHEMA = pa.schema([("chosen_ids", INTS), ("rejected_ids", INTS), ("margin", pa.float32())])

Messages = list[dict[str, Any]]


class Encoder(supervised_data.Encoder[PreferenceDataConfig]):
    """Turns pairs into `chosen_ids`, `rejected_ids` and `margin`."""

    truncations = ("error", "left", "drop")

    @staticmethod
    def problem(schema: pa.Schema, data: PreferenceDataConfig) -> str | None:
        """What is wrong with the columns of a file, to stand behind its name; None if they will do."""
        has_prompt = data.prompt_key in schema.names
        wanted = {"chosen_key": data.chosen_key, "rejected_key": data.rejected_key}
        if has_prompt:
            wanted["prompt_key"] = str(data.prompt_key)
        for setting, key in wanted.items():
            if key not in schema.names:
                return f"has no column {key!r}, but {', '.join(schema.names)}; name it with data.{setting}."
            kind = schema.field(key).type
            is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
            if not is_text and not is_list(kind):
                return f"has a column {key!r} of type {kind} where a list of {{role, content}} or text is needed."
            if is_text and not has_prompt:
                return (
                    f"has a column {key!r} of text and none for the prompt, but {', '.join(schema.names)}; name it "
                    "with data.prompt_key, or give whole conversations as lists of {role, content}."
                )
        key = data.margin_key or ""
        if not key:
            return None
        if key not in schema.names:
            return f"has no column {key!r}, but {', '.join(schema.names)}; name it with data.margin_key."
        kind = schema.field(key).type
        numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        return None if numeric else f"has a column {key!r} of type {kind} where numbers are needed."

    def columns(self, names: list[str]) -> list[str]:
        """The two sides, and prompt and margin where there are such columns."""
        data = self.data
        optional = [key for key in (data.prompt_key, data.margin_key) if key and key in names]
        return [data.chosen_key, data.rejected_key, *optional]

    def encode(self, rows: pa.Table, places: list[str]) -> pa.Table:
        """Rows of `SCHEMA`, one per pair.

        Raises:
            ValueError: a side is not a conversation that ends with the assistant, the chat template fails or makes
                nothing of it, it is too long under `data.truncation=error`, or a margin is not a finite number.
        """
        data = self.data
        prompts: list[Messages | None] = [None] * len(rows)
        if data.prompt_key in rows.column_names:
            prompts = [
                _messages(value, "user", f"{place}, column {data.prompt_key!r}")
                for value, place in zip(rows[data.prompt_key].to_pylist(), places, strict=True)
            ]
        chosen = self._side(rows, data.chosen_key, prompts, places)
        rejected = self._side(rows, data.rejected_key, prompts, places)
        for row, both in enumerate(zip(chosen, rejected, strict=True)):
            if data.truncation == "left":
                chosen[row], rejected[row] = (ids[-data.max_length :] for ids in both)
            elif max(map(len, both)) > data.max_length:
                chosen[row], rejected[row] = [], []
        margins = rows[data.margin_key].to_pylist() if data.margin_key else [0.0] * len(rows)
        for margin, place in zip(margins, places, strict=True):
            if margin is None or not math.isfinite(margin):
                raise ValueError(f"{place}, column {data.margin_key!r}: the margin is {margin}, not a finite number.")
        columns = [pa.array(chosen, INTS), pa.array(rejected, INTS), pa.array(margins, pa.float32())]
        return pa.table(columns, schema=SCHEMA)

    def _side(self, rows: pa.Table, key: str, prompts: list[Messages | None], places: list[str]) -> list[list[int]]:
        """Tokens of one side of each pair, whole."""
        data, texts = self.data, []
        places = [f"{place}, column {key!r}" for place in places]
        for value, prompt, place in zip(rows[key].to_pylist(), prompts, places, strict=True):
            messages = _messages(value, "assistant", place)
            first, last = messages[0]["role"], messages[-1]["role"]
            if last != "assistant":
                raise ValueError(f"{place}: the last message is of role {last!r}, not the assistant's answer.")
            if prompt is None and first == "assistant":
                raise ValueError(
                    f"{place}: the conversation begins with the assistant; where the prompt has a column of its own, "
                    "name it with data.prompt_key."
                )
            if prompt is not None and first in ("system", "user"):
                raise ValueError(
                    f"{place}: the answer begins with a message of role {first!r}; where the column holds the whole "
                    "conversation, set data.prompt_key=null."
                )
            texts.append(self.render([*(prompt or ()), *messages], False, place))
        tokens = self.tokenize(texts)
        for ids, place in zip(tokens, places, strict=True):
            if not ids:
                raise ValueError(f"{place}: the model's chat template makes an empty text of the conversation.")
            if len(ids) > data.max_length and data.truncation == "error":
                raise ValueError(
                    f"{place}: the conversation has {len(ids)} tokens, more than data.max_length={data.max_length}; "
                    "raise it or set data.truncation=left or data.truncation=drop."
                )
        return tokens


def _messages(value: Any, role: str, place: str) -> Messages:
    """A cell as messages; text is one message of `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise ValueError(f"{place}: {str(value)[:200]} is not a list of messages {{role, content}}.")
    messages = without_nulls(value)
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{place}: message {number} has no role: {str(message)[:200]}.")
        if "content" not in message and "tool_calls" not in message:
            raise ValueError(f"{place}: message {number} has no content: {str(message)[:200]}.")
    return messages
