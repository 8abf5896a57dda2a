"""Supervised fine-tuning on Ray Train, FSDP2 and Ray Data.

1. Loss is the mean negative log-prob of the assistant's tokens over the whole global batch: summed per micro-batch,
   divided by the batch's token count over all ranks, and added up by FSDP. Ranks and micro-batches change nothing.
2. Each rank gets exactly `train_batch_size / num_workers` rows per step as one block; the blocks are dealt to the ranks
   in turn, so step k sees the same rows on any number of ranks.
3. Rows are grouped by length into micro-batches under a token budget. Padding is then small, and every model that
   `transformers` knows can be trained.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.cluster import compute_threads
from pipeline.prompts.chat import load_tokenizer
from pipeline.rows import flat
from pipeline.train.feed import Blocks
from pipeline.train.fsdp import clip_grad_norm, save_hf, shard
from pipeline.train.optim import build_optimizer, build_scheduler
from pipeline.train.packing import minimum_parts, split_micro_batches
from pipeline.train.policy import load_policy
from pipeline.train.sft_config import SFTConfig
from pipeline.train.sft_data import Encoder, RowGroup, read

POST_EVERY_S = 0.5


@dataclass(frozen=True)
class SFTSettings:
    """What the driver gives every train worker."""

    config: SFTConfig
    steps: int
    val_groups: list[RowGroup]
    progress: Any
    """Handle of the actor that takes `post(dict)`."""


def train_loop(settings: dict[str, SFTSettings]) -> None:
    """Entry point of a Ray Train worker."""
    SFTLoop(settings["settings"]).run()


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


class SFTLoop:
    """One train worker."""

    def __init__(self, settings: SFTSettings) -> None:
        self.settings, self.config = settings, settings.config
        trainer = self.config.trainer
        context = ray.train.get_context()
        self.rank, self.world_size = context.get_world_rank(), context.get_world_size()
        self.device = ray.train.torch.get_device()
        if self.device.type == "cpu":
            torch.set_num_threads(compute_threads(trainer.num_threads, trainer.cpus_per_worker))
        self.block_rows = self.config.data.train_batch_size // self.world_size
        blocks = ray.train.get_dataset_shard("train").iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=1
        )
        hint = "trainer.data_timeout; Ray Data may lack a free CPU for its reader, or the files answer too slowly"
        self.rows = Blocks(iter(blocks), trainer.data_timeout, lambda: hint)
        self.tokenizer = load_tokenizer(self.config.model)
        self.policy = load_policy(self.config.model)
        shard(self.policy, self.config.fsdp, self.device)
        self.optimizer = build_optimizer(self.policy, self.config.optim)
        self.scheduler = build_scheduler(self.optimizer, self.config.optim, settings.steps)
        self.val_rows = self._validation_rows()
        self._posted = 0.0

    def run(self) -> None:
        """All steps, then the validation loss and the model."""
        steps, test_freq = self.settings.steps, self.config.trainer.test_freq
        tokens_seen, begun = 0, time.perf_counter()
        for step in range(1, steps + 1):
            table = self.rows.next(f"rows for step {step}")
            if table is None:
                raise RuntimeError(f"the rows ended before step {step}; did a file change while it was read?")
            if len(table) != self.block_rows:
                raise RuntimeError(f"step {step} got {len(table)} rows where {self.block_rows} were expected")
            metrics = {"step": step, "lr": self.optimizer.param_groups[0]["lr"], **self._step(table)}
            tokens_seen += self.world_size * len(flat(table, "input_ids")[0])
            metrics["tokens_per_s"] = tokens_seen / (time.perf_counter() - begun)
            if self.val_rows is not None and (step == steps or (test_freq > 0 and step % test_freq == 0)):
                metrics["val_loss"] = self._validate(self.val_rows)
            self._post(metrics, last=step == steps)
        if self.config.out is None:
            raise RuntimeError("out is not set; the driver checks it")
        save_hf(self.policy, self.tokenizer, self.config.out)

    def _step(self, table: pa.Table) -> dict[str, float]:
        """One optimiser step on this rank's rows; returns loss and gradient norm of the global batch."""
        self.policy.train()
        total = self._count(table)
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for log_probs in self._forward(table):
            part = -log_probs.sum() / max(total, 1.0)
            part.backward()
            loss += part.detach()
        norm = clip_grad_norm(self.policy.parameters(), self.config.trainer.grad_clip)
        if not math.isfinite(norm):
            raise RuntimeError(f"the gradient norm is {norm}; lower optim.lr or compute in float32")
        # Without tokens the gradient is zero, and a step would still decay the weights.
        if total:
            self.optimizer.step()
        self.scheduler.step()
        dist.all_reduce(loss)
        return {"loss": loss.item(), "grad_norm": norm}

    @torch.no_grad()
    def _validate(self, table: pa.Table) -> float:
        """Mean negative log-prob of the assistant's tokens of all ranks' rows, in nats."""
        self.policy.eval()
        total, loss = self._count(table), torch.zeros((), dtype=torch.float64, device=self.device)
        for log_probs in self._forward(table):
            loss -= log_probs.sum()
        dist.all_reduce(loss)
        return loss.item() / max(total, 1.0)

    def _forward(self, table: pa.Table) -> Iterator[Tensor]:
        """Log-probs of the learnt tokens, micro-batch by micro-batch; equally many on every rank, as FSDP needs."""
        lengths = np.diff(flat(table, "input_ids")[1]).tolist()
        budget = self.config.trainer.max_token_len_per_gpu
        parts = int(self._reduce(minimum_parts(lengths, budget), dist.ReduceOp.MAX))
        for index in split_micro_batches(lengths, budget, parts):
            input_ids, select, targets = (tensor.to(self.device) for tensor in collate(table, index))
            chunk = self.config.trainer.logits_chunk_tokens
            yield self.policy(input_ids, select, targets, chunk_tokens=chunk)[0]

    def _count(self, table: pa.Table) -> float:
        """Learnt tokens of all ranks' rows, first tokens left out as in `collate`."""
        mask, offsets = flat(table, "loss_mask")
        firsts = offsets[:-1][np.diff(offsets) > 0]
        return self._reduce(int(mask.sum()) - int(mask[firsts].sum()), dist.ReduceOp.SUM)

    def _reduce(self, value: int, op: Any) -> float:
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op)
        return tensor.item()

    def _validation_rows(self) -> pa.Table | None:
        """This rank's share of the validation rows, held for the whole run."""
        groups, data = self.settings.val_groups, self.config.data
        if not groups:
            return None
        encoder, seen, tables = Encoder(self.tokenizer, data), 0, []
        for group in groups:
            for table in read(group, encoder, data.messages_key, None):
                if data.val_max_samples >= 0:
                    table = table.slice(0, max(0, data.val_max_samples - seen))
                mine = [row for row in range(len(table)) if (seen + row) % self.world_size == self.rank]
                tables.append(table.take(pa.array(mine, pa.int64())))
                seen += len(table)
            if 0 <= data.val_max_samples <= seen:
                break
        return pa.concat_tables(tables)

    def _post(self, metrics: dict[str, float], last: bool) -> None:
        now = time.monotonic()
        if self.rank == 0 and (last or "val_loss" in metrics or now - self._posted >= POST_EVERY_S):
            self._posted = now
            handle = self.settings.progress.post.remote(metrics)
            if last:
                ray.get(handle, timeout=self.config.trainer.data_timeout)
