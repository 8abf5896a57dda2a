"""Supervised fine-tuning: the mean negative log-prob of the assistant's tokens over the global batch, in nats."""

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pipeline.config.supervised import SFTConfig
from pipeline.models.policy import Policy, load_policy
from pipeline.rows import flat
from pipeline.supervised.loop import SupervisedLoop
from pipeline.supervised.sft_data import Encoder


def collate(table: pa.Table, index: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The micro-batch of the rows `index`: ids [B, T] padded on the right, positions [N] that predict the learnt
    tokens, and those tokens [N] (see `Policy.forward`). No rows give one padding token and N = 0."""
    ids, offsets = flat(table, "input_ids")
    mask, _ = flat(table, "loss_mask")
    width = max([int(offsets[row + 1] - offsets[row]) for row in index], default=1)
    input_ids = np.zeros((max(1, len(index)), width), dtype=np.int64)
    learnt = np.zeros(input_ids.shape, dtype=bool)
    for place, row in enumerate(index):
        start, stop = offsets[row], offsets[row + 1]
        input_ids[place, : stop - start] = ids[start:stop]
        learnt[place, : stop - start] = mask[start:stop]
    learnt[:, 0] = False  # nothing predicts the first token
    targets = np.flatnonzero(learnt)
    return torch.from_numpy(input_ids), torch.from_numpy(targets - 1), torch.from_numpy(input_ids.reshape(-1)[targets])


class SFTLoop(SupervisedLoop[SFTConfig]):
    """One train worker."""

    encoder = Encoder
    measured = ("loss",)

    def load(self) -> Policy:
        return load_policy(self.config.model)

    def count(self, table: pa.Table) -> int:
        # Learnt tokens without first tokens, as in `collate`.
        mask, offsets = flat(table, "loss_mask")
        firsts = offsets[:-1][np.diff(offsets) > 0]
        return int(mask.sum()) - int(mask[firsts].sum())

    def lengths(self, table: pa.Table) -> list[int]:
        lengths: list[int] = np.diff(flat(table, "input_ids")[1]).tolist()
        return lengths

    def sums(self, table: pa.Table, index: list[int]) -> Tensor:
        input_ids, select, targets = (tensor.to(self.device) for tensor in collate(table, index))
        chunk = self.config.trainer.logits_chunk_tokens
        return -self.model(input_ids, select, targets, chunk_tokens=chunk)[0].sum(dim=0, keepdim=True)
