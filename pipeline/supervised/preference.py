"""The train worker of `jobs.reward_model`: trains a reward model from preference pairs (Bradley and Terry, 1952; Ouyang
et al., 2022, equation 1).

The loss is the mean of -log sigmoid(r_chosen - r_rejected - margin) over the pairs of the global batch. Both sides of a
pair run in one forward pass. Each side is rendered as a whole conversation, without the opening of a further message,
as in the reward-model stage of a run.
"""

import math
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pipeline.cells import from_json, values
from pipeline.config.supervised import PairDataConfig, PreferenceConfig, PreferenceDataConfig
from pipeline.conversations import Messages, begun_answer, may_be_messages, read_messages
from pipeline.models.packing import ModelInputs, lay_out
from pipeline.models.reward_model import RewardModel, load_reward_model
from pipeline.rows import INTS
from pipeline.supervised.data import RowEncoder, lists
from pipeline.supervised.loop import SupervisedLoop, WorkerSettings
from pipeline.train import ranks

SCHEMA = pa.schema([("chosen_ids", INTS), ("rejected_ids", INTS), ("margin", pa.float32())])
"""Columns of an encoded pair: token ids of both sides, and the margin. A pair that is left out has no tokens."""
MEASURED = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")


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


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    """Compute the sums over N pairs of the metrics `MEASURED`.

    Args:
        chosen: [N] rewards of the preferred sides.
        rejected: [N] rewards of the other sides.
        margin: [N] differences by which `chosen` should exceed `rejected`.

    Returns:
        [5] sums of losses, correct pairs (0.5 for a pair of equal rewards), reward differences, rewards of the chosen
        sides, and rewards of the rejected sides. Only the first has a gradient.
    """
    lead = chosen - rejected
    loss = -logsigmoid(lead - margin).sum()
    lead = lead.detach()
    correct = (torch.sign(lead) + 1) / 2
    return torch.stack([loss, correct.sum(), lead.sum(), chosen.detach().sum(), rejected.detach().sum()])


def kept_pairs(table: pa.Table) -> pa.Table:
    """Return the rows of `table` that were not left out, that is, that have tokens."""
    return table.filter(pc.greater(pc.list_value_length(table["chosen_ids"]), 0))


def collate(table: pa.Table, index: list[int], packed: bool = False) -> tuple[ModelInputs, Tensor]:
    """Build the micro-batch of the pairs with the numbers `index`, without pairs that were left out.

    Returns:
        model inputs of 2 N sequences, first all chosen sides, then all rejected sides; and margins [N]. If N = 0, the
        inputs have a single padding token.
    """
    pairs = kept_pairs(table.take(pa.array(index, pa.int64())))
    rows = lists([*pairs["chosen_ids"], *pairs["rejected_ids"]])
    return lay_out(rows, packed), torch.tensor(pairs["margin"].to_pylist(), dtype=torch.float32)


class PreferenceLoop(SupervisedLoop[PreferenceConfig]):
    """The train loop of one train worker of `jobs.reward_model`."""

    encoder = PreferenceEncoder
    measured = MEASURED

    def __init__(self, settings: WorkerSettings[PreferenceConfig]) -> None:
        super().__init__(settings)
        self._dropped = 0.0
        self._last_tokens: set[int] = set()

    def load(self) -> RewardModel:
        # A language model gets a new head.
        longest = self.config.data.max_length
        model = load_reward_model(self.config.model, new_head=True, mesh=self.mesh, longest=longest)
        if model.max_length is not None and longest > model.max_length:
            raise ValueError(
                f"data.max_length={longest} is more than the {model.max_length} tokens that the model has positions "
                "for; lower it."
            )
        return model

    def count(self, table: pa.Table) -> int:
        return len(kept_pairs(table))

    def lengths(self, table: pa.Table) -> list[int]:
        sides = [pc.list_value_length(table[name]) for name in ("chosen_ids", "rejected_ids")]
        if self.packed:
            return list(pc.add(*sides).to_pylist())
        # Both sides are padded to the longer one.
        return [2 * length for length in pc.max_element_wise(*sides).to_pylist()]

    def sums(self, table: pa.Table, index: list[int]) -> Tensor:
        batch, margin = collate(table, index, self.packed)
        batch, margin = batch.to(self.device), margin.to(self.device)
        rewards, pairs = self.model(batch.input_ids, batch.lengths, batch.positions, batch.packing), len(margin)
        return bradley_terry(rewards[:pairs], rewards[pairs : 2 * pairs], margin)

    def step(self, table: pa.Table) -> dict[str, float]:
        """Take one optimiser step on the rows of `table`; a collective.

        Returns the metrics of the global batch. `dropped` is the number of pairs left out so far in the run.
        """
        metrics = super().step(table)
        self._dropped += metrics["dropped"]
        self._last_tokens |= {int(row[-1]) for row in kept_pairs(table)["chosen_ids"]}
        return metrics | {"dropped": self._dropped}

    def state(self) -> dict[str, Any]:
        return {"dropped": self._dropped, "last_tokens": sorted(self._all_last_tokens())}

    def load_state(self, state: dict[str, Any]) -> None:
        self._dropped, self._last_tokens = state["dropped"], set(state["last_tokens"])

    def _all_last_tokens(self) -> set[int]:
        """Return the last tokens of all ranks' conversations so far; a collective."""
        return set[int]().union(*ranks.all_gather(self._last_tokens))

    def means(self, sums: list[float], total: float, rows: int) -> dict[str, float]:
        """Compute the metrics of a batch. If no pair was kept, means are left out. Arguments are as in
        `SupervisedLoop.means`."""
        return {**(super().means(sums, total, rows) if total else {}), "dropped": rows - total}

    def save(self) -> None:
        """Save the model and its tokenizer.

        Raises:
            RuntimeError: every pair was left out.
        """
        self.check_kept(self._dropped, "pairs")
        last_tokens = self._all_last_tokens()
        if self.model.is_decoder:
            # `transformers` scores the last token that is not padding. If conversations end with the pad token, no id
            # fits; without an id it refuses batches instead of scoring another token.
            pad_token: Any = self.tokenizer.pad_token_id
            ends_with_pad = pad_token in last_tokens
            self.model.lm.config.get_text_config().pad_token_id = None if ends_with_pad else pad_token
        super().save()
