"""Turn preference pairs into token rows.

1. Each side is rendered as a whole conversation by the model's chat template, without the opening of a further turn, as
   a reward model gets it in a run.
2. A row is `chosen_ids`, `rejected_ids` and `margin`. A pair that is left out has no tokens.
"""

import math
from typing import Any

import pyarrow as pa

from pipeline.config.supervised import PreferenceDataConfig
from pipeline.rows import INTS
from pipeline.supervised import data
from pipeline.supervised.data import is_list, without_nulls

SCHEMA = pa.schema([("chosen_ids", INTS), ("rejected_ids", INTS), ("margin", pa.float32())])

Messages = list[dict[str, Any]]


class Encoder(data.Encoder[PreferenceDataConfig]):
    """Turns pairs into rows of `SCHEMA`."""

    @staticmethod
    def problem(schema: pa.Schema, data: PreferenceDataConfig) -> str | None:
        names = ", ".join(schema.names)
        has_prompt = data.prompt_key in schema.names
        keys = {"chosen_key": data.chosen_key, "rejected_key": data.rejected_key}
        if has_prompt:
            keys["prompt_key"] = str(data.prompt_key)
        if data.margin_key:
            keys["margin_key"] = data.margin_key
        for setting, key in keys.items():
            if key not in schema.names:
                return f"has no column {key!r}, but {names}; name it with data.{setting}."
            kind = schema.field(key).type
            if setting == "margin_key":
                if not pa.types.is_integer(kind) and not pa.types.is_floating(kind):
                    return f"has a column {key!r} of type {kind} where numbers are needed."
                continue
            is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
            if not is_text and not is_list(kind):
                return f"has a column {key!r} of type {kind} where a list of {{role, content}} or text is needed."
            if is_text and not has_prompt:
                return (
                    f"has a column {key!r} of text and none for the prompt, but {names}; name it with data.prompt_key, "
                    "or give whole conversations as lists of {role, content}."
                )
        return None

    def columns(self, names: list[str]) -> list[str]:
        data = self.data
        optional = [key for key in (data.prompt_key, data.margin_key) if key and key in names]
        return [data.chosen_key, data.rejected_key, *optional]

    def encode(self, rows: pa.Table, places: list[str]) -> pa.Table:
        data = self.data
        prompts: list[Messages | None] = [None] * len(rows)
        if data.prompt_key in rows.column_names:
            cells = zip(rows[data.prompt_key].to_pylist(), places, strict=True)
            prompts = [_messages(value, "user", f"{place}, column {data.prompt_key!r}") for value, place in cells]
        chosen = self._side(rows, data.chosen_key, prompts, places)
        rejected = self._side(rows, data.rejected_key, prompts, places)
        if data.truncation == "left":
            chosen = [ids[-data.max_length :] for ids in chosen]
            rejected = [ids[-data.max_length :] for ids in rejected]
        for row in range(len(rows)):
            if max(len(chosen[row]), len(rejected[row])) > data.max_length:
                chosen[row], rejected[row] = [], []
        margins = rows[data.margin_key].to_pylist() if data.margin_key else [0.0] * len(rows)
        for margin, place in zip(margins, places, strict=True):
            if margin is None or not math.isfinite(margin):
                raise ValueError(f"{place}, column {data.margin_key!r}: the margin is {margin}, not a finite number.")
        return pa.table([chosen, rejected, pa.array(margins, pa.float32())], schema=SCHEMA)

    def _side(self, rows: pa.Table, key: str, prompts: list[Messages | None], places: list[str]) -> list[list[int]]:
        """Tokens of one side of each pair, before truncation."""
        limit = self.data.max_length
        places = [f"{place}, column {key!r}" for place in places]
        texts = []
        for value, prompt, place in zip(rows[key].to_pylist(), prompts, places, strict=True):
            messages = _messages(value, "assistant", place)
            first = messages[0]["role"]
            last = messages[-1]["role"]
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
            if len(ids) > limit and self.data.truncation == "error":
                raise ValueError(
                    f"{place}: the conversation has {len(ids)} tokens, more than data.max_length={limit}; raise it or "
                    "set data.truncation=left or data.truncation=drop."
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
