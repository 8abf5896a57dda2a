"""Conversations to token rows.

1. Prompt and answer are tokenised apart, as they are when the policy generates: a token never spans the border.
2. One row is `input_ids` and `loss_mask` of equal length, 1 where the token is the assistant's.
3. A row without a token to learn stays in with a zero mask.
"""

from typing import Any

import pyarrow as pa

from pipeline.rows import INTS
from pipeline.train import supervised_data
from pipeline.train.sft_config import SFTDataConfig
from pipeline.train.supervised_data import RowGroup, find_row_groups, is_list, without_nulls

SCHEMA = pa.schema([("input_ids", INTS), ("loss_mask", pa.list_(pa.int8()))])


def row_groups(paths: Any, config_key: str, messages_key: str) -> list[RowGroup]:
    """The row groups of all files that `paths` names, in order.

    Raises:
        ValueError: a path names nothing, a file is not parquet, has no rows, or lacks the column.
    """
    data = SFTDataConfig(messages_key=messages_key)
    return find_row_groups(paths, config_key, lambda schema: Encoder.problem(schema, data))


class Encoder(supervised_data.Encoder[SFTDataConfig]):
    """Turns conversations into `input_ids` and `loss_mask`."""

    truncations = ("error", "right")

    @staticmethod
    def problem(schema: pa.Schema, data: SFTDataConfig) -> str | None:
        """What is wrong with the columns of a file, to stand behind its name; None if they will do."""
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
        """The column of messages."""
        return [self.data.messages_key]

    def encode(self, rows: pa.Table, places: list[str]) -> pa.Table:
        """Rows of `SCHEMA`; see `__call__`."""
        key = self.data.messages_key
        return self(rows[key].to_pylist(), [f"{place}, column {key!r}" for place in places])

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
        tokens = iter(self.tokenize(texts))
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
                    f"{place}: the chat template writes earlier messages anew at message {number}, so its tokens "
                    "cannot be told apart; split the conversation into one row per answer."
                )
            segments += [(prompt[len(done) :], False), (whole[len(prompt) :], True)]
            done = whole
        return segments
