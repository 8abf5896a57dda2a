"""Encoding of preference pairs for DPO: a prompt, and the answers `chosen` and `rejected`, as rows of tokens.

1. The prompt is tokenised as when the policy generates. Each assistant message of an answer is tokenised separately
   from the text before it (`sft_data.py`). So both answers follow the same tokens of the prompt.
2. Each row has its number among the rows of all files, by which the reference's log-probs are kept (`dpo.py`).
"""

from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.cells import values
from pipeline.config.preference import DPODataConfig
from pipeline.conversations import Messages
from pipeline.models.special_tokens import Spellings
from pipeline.prompts.parquet import Slice
from pipeline.rows import INTS
from pipeline.supervised.data import RowEncoder, RowGroup
from pipeline.supervised.preference_data import cell_messages, check_sides, prompt_messages

CHOSEN, REJECTED = SIDES = ("chosen", "rejected")
_MASK = pa.list_(pa.int8())
SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("prompt_ids", INTS),
        *[column for side in SIDES for column in ((f"{side}_ids", INTS), (f"{side}_mask", _MASK))],
    ]
)
"""Columns of an encoded pair: token ids of the prompt and of both answers. The mask of an answer is 1 for tokens that
the policy generates. A pair that is left out has no tokens."""

ROW = "row number"
"""Column that `whole` adds: number of the row among the rows of all files."""

Segments = list[tuple[str, bool]]
"""Texts that make up an answer, each with True if the assistant writes it, so that it trains."""


class DPOEncoder(RowEncoder[DPODataConfig]):
    """Encoder that turns preference pairs into rows of `SCHEMA`."""

    schema = SCHEMA

    @classmethod
    def find_row_groups(cls, paths: Any, key: str, data: DPODataConfig) -> list[RowGroup]:
        """Find row groups as `RowEncoder.find_row_groups` does, and check all rows for a prompt and two answers."""
        groups = super().find_row_groups(paths, key, data)
        encoder = cls(None, data)
        columns = [name for name in encoder.columns() if name]
        for group in groups:
            for part, batch in group.file.read([Slice(group.number, 0, group.rows)], columns):
                places = [f"{key}: {group.file.place(part.row_group, row)}" for row in range(part.start, part.stop)]
                for row, place in zip(values(batch, places), places, strict=True):
                    encoder.answers(row, place)
        return groups

    @staticmethod
    def check(schema: pa.Schema, where: str, data: DPODataConfig) -> None:
        check_sides(schema, where, data)

    def columns(self) -> list[str | None]:
        return [self.data.prompt_key, self.data.chosen_key, self.data.rejected_key]

    def whole(self, rows: pa.Table, group: RowGroup) -> pa.Table:
        return rows.append_column(ROW, pa.array(np.arange(group.first, group.first + len(rows))))

    def encode(self, rows: pa.Table, places: list[str]) -> pa.Table:
        encoded: list[dict[str, Any]] = []
        texts: list[str] = []
        spellings: list[Spellings] = []
        learnt: list[list[tuple[str, bool]]] = []  # per row and segment: its side, and whether it is learnt
        for row, place in zip(values(rows, places), places, strict=True):
            prompt, answers = self.answers(row, place)
            spelled = self.spellings((prompt, *answers.values()), place)
            opening = self.write(spelled, prompt, True, place)
            first = len(texts)
            texts.append(opening)
            learnt.append([])
            for number, (side, answer) in enumerate(answers.items()):
                where = f"{place}, {side} answer"
                segments = self._segments(spelled, prompt, opening, answer, where)
                whole = spelled.show(opening + "".join(text for text, _ in segments))
                self.check_written([*prompt, *answer], whole, where, len(prompt) * (number > 0))
                for text, of_assistant in segments:
                    texts.append(text)
                    learnt[-1].append((side, of_assistant))
            spellings += [spelled] * (len(texts) - first)
            encoded.append({"row": row[ROW]})
        tokens = iter(self.special.encode(texts, spellings))
        for line, sides, place in zip(encoded, learnt, places, strict=True):
            line |= self._fitted(next(tokens), [(*side, next(tokens)) for side in sides], place)
        return pa.Table.from_pylist(encoded, schema=self.schema)

    def answers(self, row: dict[str, Any], place: str) -> tuple[Messages, dict[str, Messages]]:
        """Read the prompt of a row, and the answers `chosen` and `rejected`, as messages.

        Without a column for the prompt, it is the common beginning of both sides.

        Raises:
            ValueError: an answer or the prompt is missing, or both answers are equal; the sentence begins with `place`.
        """
        keys = {CHOSEN: self.data.chosen_key, REJECTED: self.data.rejected_key}
        sides = {side: answer_messages(row[key], f"{place}, column {key!r}") for side, key in keys.items()}
        if sides[CHOSEN] == sides[REJECTED]:
            raise ValueError(
                f"{place}: the columns {keys[CHOSEN]!r} and {keys[REJECTED]!r} are equal, so there is no preference; "
                "remove the row."
            )
        if self.data.prompt_key in row:
            return self._prompt(row, place), {
                side: self._behind_prompt(answer, f"{place}, column {keys[side]!r}") for side, answer in sides.items()
            }
        chosen, rejected = sides[CHOSEN], sides[REJECTED]
        same = 0
        while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
            same += 1
        # The sides part at the beginning of the assistant's answer.
        while same and not all(_begins_answer(side, same) for side in (chosen, rejected)):
            same -= 1
        if not same:
            raise ValueError(
                f"{place}: the columns {keys[CHOSEN]!r} and {keys[REJECTED]!r} do not begin with the same prompt; if "
                "the prompt has its own column, name it with data.prompt_key."
            )
        return chosen[:same], {CHOSEN: chosen[same:], REJECTED: rejected[same:]}

    def _prompt(self, row: dict[str, Any], place: str) -> Messages:
        key = str(self.data.prompt_key)
        place = f"{place}, column {key!r}"
        if row[key] is None or row[key] in ("", []):
            raise ValueError(f"{place}: the prompt is empty; remove the row, or give one.")
        return prompt_messages(row[key], place)

    def _behind_prompt(self, answer: Messages, place: str) -> Messages:
        first = answer[0]["role"]
        if first != "assistant":
            raise ValueError(
                f"{place}: the answer begins with a message of role {first!r}; if the column holds the whole "
                "conversation, set data.prompt_key=null."
            )
        return answer

    def _segments(self, spellings: Spellings, prompt: Messages, opening: str, answer: Messages, place: str) -> Segments:
        """Render an answer as the texts that follow the rendered prompt.

        Args:
            spellings: special tokens that texts of the row spell; the texts get stand-ins for these.
            prompt: messages of the prompt.
            opening: the rendered prompt, with the opening of an assistant message.
            answer: messages of the answer.
            place: beginning of errors: file, row and side.
        """
        segments: Segments = []
        done = opening
        for number, message in enumerate(answer):
            if message["role"] != "assistant":
                continue
            before = self.write(spellings, [*prompt, *answer[:number]], True, place) if number else opening
            whole = self.write(spellings, [*prompt, *answer[: number + 1]], False, place)
            self.check_answer([*prompt, *answer[: number + 1]], spellings.show(whole), place)
            if not before.startswith(done) or not whole.startswith(before):
                raise ValueError(
                    f"{place}: the chat template changes earlier messages at message {number}, so the tokens of the "
                    "answer cannot be distinguished; put earlier answers into the prompt."
                )
            segments += [(before[len(done) :], False), (whole[len(before) :], True)]
            done = whole
        return segments

    def _fitted(self, prompt: list[int], segments: list[tuple[str, bool, list[int]]], place: str) -> dict[str, Any]:
        """Return the token columns of one row, shortened by `data.truncation` if a side exceeds `data.max_length`.

        Args:
            prompt: token ids of the prompt.
            segments: (side, whether the assistant writes it, token ids) of the segments of both answers.
            place: beginning of errors: file and row.
        """
        ids: dict[str, list[int]] = {side: [] for side in SIDES}
        mask: dict[str, list[int]] = {side: [] for side in SIDES}
        for side, of_assistant, part in segments:
            count = self.answer_length(part) if of_assistant else 0
            ids[side] += part
            mask[side] += [1] * count + [0] * (len(part) - count)
        limit, truncation = self.data.max_length, self.data.truncation
        longest = max(len(ids[CHOSEN]), len(ids[REJECTED]))
        excess = len(prompt) + longest - limit
        if excess > 0 and (truncation == "error" or (truncation == "left" and excess >= len(prompt))):
            what = "the conversation" if truncation == "error" else "the answer, without any of its prompt,"
            raise ValueError(
                f"{place}: {what} has {longest + (truncation == 'error') * len(prompt)} tokens, more than fit into "
                f"data.max_length={limit}; raise it or set data.truncation=drop."
            )
        if excess > 0 and truncation == "drop":
            return {"prompt_ids": [], **{f"{side}_{kind}": [] for side in SIDES for kind in ("ids", "mask")}}
        prompt = prompt[max(0, excess) :]
        tokens = {f"{side}_ids": part for side, part in ids.items()}
        return {"prompt_ids": prompt, **tokens, **{f"{side}_mask": part for side, part in mask.items()}}


def answer_messages(value: Any, place: str) -> Messages:
    """Read the cell of a column as messages that end with a message of the assistant.

    Raises:
        ValueError: the cell is empty, or its last message is another one; the sentence begins with `place`.
    """
    if value is None or value in ("", []):
        raise ValueError(f"{place}: the answer is empty; remove the row, or give one.")
    messages = cell_messages(value, "assistant", place)
    last = messages[-1]
    if last["role"] != "assistant":
        raise ValueError(f"{place}: the last message is of role {last['role']!r}, not the assistant's answer.")
    if not last["content"] and not last.get("tool_calls"):
        raise ValueError(f"{place}: the assistant's answer is empty; remove the row, or give one.")
    return messages


def _begins_answer(messages: Messages, place: int) -> bool:
    """Return whether message number `place` is of the assistant, and the message before it of another role."""
    roles = [message["role"] for message in messages[place - 1 : place + 1]]
    return len(roles) == 2 and roles[1] == "assistant" != roles[0]
