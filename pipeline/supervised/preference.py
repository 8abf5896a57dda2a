"""The train worker of `jobs.reward_model`: trains a reward model from preference pairs (Bradley and Terry, 1952; Ouyang
et al., 2022, equation 1).

The loss is the mean of -log sigmoid(r_chosen - r_rejected - margin) over the pairs of the global batch. Both sides of a
pair run in one forward pass. `preference_data.py` makes their tokens.
"""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pipeline.config.supervised import PreferenceConfig
from pipeline.models.packing import ModelInputs, lay_out
from pipeline.models.reward_model import RewardModel, load_reward_model
from pipeline.supervised.data import lists
from pipeline.supervised.loop import SupervisedLoop, WorkerSettings
from pipeline.supervised.preference_data import PreferenceEncoder
from pipeline.train import ranks

MEASURED = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")


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
