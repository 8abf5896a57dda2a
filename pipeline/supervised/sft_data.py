"""Encoding of conversations for supervised fine-tuning: rows of tokens, and which of them train.

1. Each assistant message is tokenised separately from the text before it, as when the policy generates: no token spans
   the border. So every assistant message follows the same tokens as in an episode, tool results included.
2. A message may have a `loss_mask` (or `trainable`, as in newer files of verl, or OpenAI's `weight`). With 0 an
   assistant message is only context, and does not train.
3. A chat template may change earlier assistant messages when a later one is added, for example remove their thinking.
   This is accepted as long as no earlier message trains: then the model reads the same text as when it is served.
   Otherwise the conversation is refused.
4. With `model.vision`, messages may show images, as in prompts. Their features take the places of the placeholders.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow as pa

from pipeline.cells import values
from pipeline.config.supervised import SFTDataConfig
from pipeline.conversations import may_be_messages, read_messages, read_tools, with_images
from pipeline.models.special_tokens import Spellings
from pipeline.omissions import check_tools
from pipeline.prompts.images import read_images
from pipeline.rows import BINARIES, INTS
from pipeline.supervised.data import RowEncoder, RowGroup

SCHEMA = pa.schema([("input_ids", INTS), ("loss_mask", pa.list_(pa.int8()))])
"""Columns of an encoded conversation: two lists of equal length. The mask is 1 for tokens that train."""
IMAGES = pa.field("images", BINARIES)
"""Further column of runs with `model.vision`: the encoded images of the conversation, in order."""
FILE = "file of the row"
"""Column that `SFTEncoder` adds to rows with images: paths of images are relative to the file's folder."""


class SFTEncoder(RowEncoder[SFTDataConfig]):
    """Encoder that turns conversations into rows of `SCHEMA`."""

    @staticmethod
    def check(schema: pa.Schema, where: str, data: SFTDataConfig) -> None:
        key = data.messages_key
        if key not in schema.names:
            raise ValueError(
                f"{where} has no column {key!r}, but {', '.join(schema.names)}; name the column of chat messages with "
                "data.messages_key."
            )
        kind = schema.field(key).type
        if not may_be_messages(kind):
            raise ValueError(f"{where} has a column {key!r} of type {kind} instead of a list of {{role, content}}.")
        for setting in ("tools_key", "enable_thinking_key"):
            key = getattr(data, setting)
            if key not in schema.names and key != getattr(SFTDataConfig, setting):
                raise ValueError(
                    f"{where} has no column {key!r}, but {', '.join(schema.names)}; change data.{setting}."
                )

    def columns(self) -> list[str | None]:
        shown = [self.data.image_key] if self.vision else []
        return [self.data.messages_key, self.data.tools_key, self.data.enable_thinking_key, *shown]

    def whole(self, rows: pa.Table, group: RowGroup) -> pa.Table:
        return rows.append_column(FILE, pa.repeat(group.file.name, len(rows))) if self.vision else rows

    def encode(self, rows: pa.Table, places: list[str]) -> pa.Table:
        data = self.data
        limit = data.max_length
        encoded = []
        for row, place in zip(values(rows, places), places, strict=True):
            images = self._images(row, place)
            segments, spellings = self.segments(row, place, len(images))
            place = f"{place}, column {data.messages_key!r}"
            left = iter(images)
            ids: list[int] = []
            mask: list[int] = []
            tokens = self.special.encode([text for text, _ in segments], [spellings] * len(segments))
            for (_, learnt), part in zip(segments, tokens, strict=True):
                if self.vision:
                    part = self._expanded(part, left, place)
                answer = self.answer_length(part) if learnt else 0
                ids += part
                mask += [1] * answer + [0] * (len(part) - answer)
            if len(ids) > limit and images:
                raise ValueError(
                    f"{place}: the conversation has {len(ids)} tokens, more than data.max_length={limit}, and one with "
                    "images cannot be cut; raise it."
                )
            if next(left, None) is not None:
                raise ValueError(f"{place}: an image comes after the last answer; remove it.")
            if len(ids) > limit and data.truncation == "error":
                raise ValueError(
                    f"{place}: the conversation has {len(ids)} tokens, more than data.max_length={limit}; raise it or "
                    "set data.truncation=right."
                )
            encoded.append({"input_ids": ids[:limit], "loss_mask": mask[:limit], "images": images})
        return pa.Table.from_pylist(encoded, schema=SCHEMA.append(IMAGES) if self.vision else SCHEMA)

    def _images(self, row: dict[str, Any], place: str) -> list[bytes]:
        """Return the encoded images of a row; [] in a run without images.

        Raises ValueError, with `place` (file and row) at its beginning, if they cannot be read.
        """
        try:
            return read_images(row, row[FILE], self.data) if self.vision else []
        except ValueError as error:
            raise ValueError(f"{place}: {error}.") from error

    def _expanded(self, part: list[int], left: Iterator[bytes], place: str) -> list[int]:
        """Return the tokens `part` with the expansions of the next images in place of their placeholders."""
        assert self.vision is not None
        shown = list(islice(left, part.count(self.vision.placeholder)))
        try:
            return self.vision.expand(part, shown)
        except ValueError as error:
            raise ValueError(f"{place}: {error}.") from error

    def _template_arguments(self, row: dict[str, Any], place: str) -> dict[str, Any]:
        """Return the arguments of the chat template that a row has in columns: `tools` and `enable_thinking`.

        Raises ValueError, with `place` (file and row) at its beginning, if a column holds something else.
        """
        arguments: dict[str, Any] = {}
        key = self.data.tools_key
        tools = read_tools(row.get(key), f"{place}, column {key!r}")
        if tools is not None:
            arguments["tools"] = tools
        key = self.data.enable_thinking_key
        thinking = row.get(key)
        if not isinstance(thinking, bool | None):
            raise ValueError(f"{place}, column {key!r}: {thinking!r} is neither true nor false.")
        if thinking is not None:
            arguments["enable_thinking"] = thinking
            if "enable_thinking" not in self.arguments_of_template:
                note = f"the model's chat template does not read enable_thinking, which the column {key!r} gives"
                self.omissions.note(note)
        return arguments

    def segments(self, row: dict[str, Any], place: str, images: int = 0) -> tuple[list[tuple[str, bool]], Spellings]:
        """Render the conversation of a row with `images` images as a sequence of segments.

        Returns the segments in order, as (text with stand-ins, whether it trains), and the special tokens that texts
        spell, which define the stand-ins.

        Raises:
            ValueError: the conversation cannot be used; the sentence begins with `place` (file and row).
        """
        arguments = self._template_arguments(row, place)
        place = f"{place}, column {self.data.messages_key!r}"
        messages = with_images(read_messages(row[self.data.messages_key], place, images > 0), images, place)
        learnt = [take_learnt(message, f"{place}: message {number}") for number, message in enumerate(messages)]
        spellings = self.spellings((messages, arguments), place)
        segments: list[tuple[str, bool]] = []
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.write(spellings, messages[:number], True, place, **arguments)
            whole = self.write(spellings, messages[: number + 1], False, place, **arguments)
            if learnt[number]:
                self.check_answer(messages[: number + 1], spellings.show(whole), place, **arguments)
            if not prompt.startswith(done) and not any(taught for _, taught in segments):
                # The template changes only context here.
                segments, done = [], ""
            if not prompt.startswith(done) or not whole.startswith(prompt):
                raise ValueError(
                    f"{place}: the chat template changes earlier messages at message {number}, so the tokens of each "
                    "cannot be distinguished; split the conversation into one row per answer, in which the answers "
                    "before it have loss_mask 0."
                )
            segments += [(prompt[len(done) :], False), (whole[len(prompt) :], learnt[number])]
            done = whole
        if segments:
            last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
            if last + 1 < len(messages):
                self.omissions.note("messages after the last answer of a conversation are left out")
            done = spellings.show(done)
            self.check_written(messages[: last + 1], done, place, **arguments)
            if tools := arguments.get("tools"):
                rest = {**arguments, "tools": None}
                where = f"{place}, column {self.data.tools_key!r}"
                check_tools(tools, done, lambda: self.render(messages[: last + 1], False, place, **rest), where)
        else:
            raise ValueError(f"{place}: {str(messages)[:200]} has no message of the assistant.")
        return segments, spellings


def take_learnt(message: dict[str, Any], place: str) -> bool:
    """Return whether a message trains, and remove the fields for this, which the chat template does not know.

    Raises:
        ValueError: a field is not 0, 1, true or false, or marks a message of another role than the assistant's.
    """
    answer = message["role"] == "assistant"
    learnt = answer
    for name in ("loss_mask", "trainable", "weight"):
        value = message.pop(name, learnt)
        if value not in (0, 1):
            raise ValueError(f"{place} has {name} {value!r:.50}, which must be 0 or 1.")
        if value and not answer:
            raise ValueError(
                f"{place} has {name} 1 but is of role {message['role']!r}; only answers of the assistant can be learnt."
            )
        learnt = learnt and bool(value)
    return learnt
