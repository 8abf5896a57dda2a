"""Turn conversations into token rows.

1. Prompt and answer are tokenised separately, as they are when the policy generates: no token spans the border.
2. A row is `input_ids` and `loss_mask` of equal length; the mask is 1 where the token is the assistant's.
"""

from typing import Any

import pyarrow as pa

from pipeline.config.supervised import SFTDataConfig
from pipeline.rows import INTS
from pipeline.supervised import data
from pipeline.supervised.data import is_list, without_nulls

SCHEMA = pa.schema([("input_ids", INTS), ("loss_mask", pa.list_(pa.int8()))])


class Encoder(data.Encoder[SFTDataConfig]):
    """Turns conversations into rows of `SCHEMA`."""

    @staticmethod
    def problem(schema: pa.Schema, data: SFTDataConfig) -> str | None:
        key = data.messages_key
        if key not in schema.names:
            return (
                f"has no column {key!r}, but {', '.join(schema.names)}; name the column of chat messages with "
                "data.messages_key."
            )
        kind = schema.field(key).type
        if not is_list(kind):
            return f"has a column {key!r} of type {kind} where a list of {{role, content}} is needed."
        return None

    def columns(self, names: list[str]) -> list[str]:
        return [self.data.messages_key]

    def encode(self, rows: pa.Table, places: list[str]) -> pa.Table:
        key = self.data.messages_key
        limit = self.data.max_length
        places = [f"{place}, column {key!r}" for place in places]
        conversations = [
            self._segments(messages, place) for messages, place in zip(rows[key].to_pylist(), places, strict=True)
        ]
        tokens = iter(self.tokenize([text for segments in conversations for text, _ in segments]))
        columns: tuple[list[list[int]], list[list[int]]] = ([], [])
        for segments, place in zip(conversations, places, strict=True):
            ids: list[int] = []
            mask: list[int] = []
            for _, learnt in segments:
                part = next(tokens)
                answer = self._answer_length(part) if learnt else 0
                ids += part
                mask += [1] * answer + [0] * (len(part) - answer)
            if len(ids) > limit and self.data.truncation == "error":
                raise ValueError(
                    f"{place}: the conversation has {len(ids)} tokens, more than data.max_length={limit}; raise it or "
                    "set data.truncation=right."
                )
            columns[0].append(ids[:limit])
            columns[1].append(mask[:limit])
        return pa.table(list(columns), schema=SCHEMA)

    def _answer_length(self, part: list[int]) -> int:
        """Tokens up to the last end of turn: the policy never generates what templates write after it."""
        end = self.tokenizer.eos_token_id
        return len(part) - part[::-1].index(end) if end in part else len(part)

    def _segments(self, messages: Any, place: str) -> list[tuple[str, bool]]:
        """The rendered conversation as (text, learnt) in order."""
        valid = isinstance(messages, list) and all(isinstance(m, dict) and m.get("role") for m in messages)
        if not valid or not any(m["role"] == "assistant" for m in messages):
            raise ValueError(f"{place}: {str(messages)[:200]} is not a list of messages with one of the assistant.")
        messages = without_nulls(messages)
        segments: list[tuple[str, bool]] = []
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.render(messages[:number], True, place)
            whole = self.render(messages[: number + 1], False, place)
            if not prompt.startswith(done) or not whole.startswith(prompt):
                raise ValueError(
                    f"{place}: the chat template changes earlier messages at message {number}, so the tokens of each "
                    "cannot be told apart; split the conversation into one row per answer."
                )
            segments += [(prompt[len(done) :], False), (whole[len(prompt) :], True)]
            done = whole
        return segments
