"""Training of a reward model from preference pairs (Bradley and Terry, 1952; Ouyang et al., 2022, equation 1).

The loss is the mean of -log sigmoid(r_chosen - r_rejected - margin) over the pairs of the global batch. Both sides of a
pair run in one forward pass.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pipeline.config.supervised import PreferenceConfig
from pipeline.models.reward_model import RewardModel, load_reward_model
from pipeline.rows import flat
from pipeline.supervised.loop import Settings, SupervisedLoop
from pipeline.supervised.preference_data import Encoder

SIDES = ("chosen_ids", "rejected_ids")
MEASURED = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    """Sums of the `MEASURED` metrics over pairs.

    Args:
        chosen: [N] rewards of the preferred sides.
        rejected: [N] rewards of the others.
        margin: [N], by how much `chosen` should exceed `rejected`.

    Returns:
        [5]; only the first, the loss, has a gradient. A pair of equal rewards counts as half correct.
    """
    lead = chosen - rejected
    loss = -logsigmoid(lead - margin).sum()
    lead = lead.detach()
    correct = (torch.sign(lead) + 1) / 2
    return torch.stack([loss, correct.sum(), lead.sum(), chosen.detach().sum(), rejected.detach().sum()])


def collate(table: pa.Table, index: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The micro-batch of the pairs `index` that have tokens.

    Returns:
        ids [2 N, T] padded on the right, the preferred sides first; lengths [2 N]; margins [N]. No pairs give two rows
        of one padding token, and N = 0 margins.
    """
    sides = [flat(table, name) for name in SIDES]
    index = [row for row in index if sides[0][1][row + 1] > sides[0][1][row]]
    rows = [ids[offsets[row] : offsets[row + 1]] for ids, offsets in sides for row in index]
    lengths = np.array([len(row) for row in rows] or [1, 1], dtype=np.int64)
    input_ids = np.zeros((len(lengths), lengths.max()), dtype=np.int64)
    for place, row in enumerate(rows):
        input_ids[place, : len(row)] = row
    margin = table["margin"].to_numpy()[index].astype(np.float32)
    return torch.from_numpy(input_ids), torch.from_numpy(lengths), torch.from_numpy(margin)


class PreferenceLoop(SupervisedLoop[PreferenceConfig]):
    """One train worker."""

    encoder = Encoder
    measured = MEASURED

    def __init__(self, settings: Settings[PreferenceConfig]) -> None:
        super().__init__(settings)
        self._dropped = 0.0
        self._last_tokens: set[int] = set()

    def load(self) -> RewardModel:
        # A language model gets a new head.
        model = load_reward_model(self.config.model, new_head=True)
        longest = self.config.data.max_length
        if model.max_length is not None and longest > model.max_length:
            raise ValueError(
                f"data.max_length={longest} is more than the {model.max_length} tokens that the model has positions "
                "for; lower it."
            )
        return model

    def count(self, table: pa.Table) -> int:
        return int((np.diff(flat(table, SIDES[0])[1]) > 0).sum())

    def lengths(self, table: pa.Table) -> list[int]:
        # Both sides of a pair are padded to the longer one.
        chosen, rejected = (np.diff(flat(table, name)[1]) for name in SIDES)
        lengths: list[int] = (2 * np.maximum(chosen, rejected)).tolist()
        return lengths

    def sums(self, table: pa.Table, index: list[int]) -> Tensor:
        input_ids, lengths, margin = (tensor.to(self.device) for tensor in collate(table, index))
        rewards, pairs = self.model(input_ids, lengths), len(margin)
        return bradley_terry(rewards[:pairs], rewards[pairs : 2 * pairs], margin)

    def step(self, table: pa.Table) -> dict[str, float]:
        """One optimiser step; `dropped` counts the pairs left out so far."""
        metrics = super().step(table)
        self._dropped += metrics["dropped"]
        ids, offsets = flat(table, SIDES[0])
        self._last_tokens |= set(ids[offsets[1:][np.diff(offsets) > 0] - 1].tolist())
        return metrics | {"dropped": self._dropped}

    def means(self, sums: list[float], total: float, rows: int) -> dict[str, float]:
        """The metrics, without means where every pair was left out."""
        return {**(super().means(sums, total, rows) if total else {}), "dropped": rows - total}

    def save(self) -> None:
        """Save the model and its tokenizer.

        Raises:
            RuntimeError: every pair was left out.
        """
        config = self.config
        if self._dropped == self.settings.steps * config.data.train_batch_size:
            raise RuntimeError(
                f"all pairs were left out: none fits into data.max_length={config.data.max_length}; raise it"
            )
        if self.model.is_decoder:
            # `transformers` scores the last token that is not padding. Where conversations end with the pad token no
            # id will do, and without one it refuses batches instead of scoring another token.
            pad: Any = self.tokenizer.pad_token_id
            self.model.lm.config.get_text_config().pad_token_id = None if pad in self._last_tokens else pad
        super().save()
