"""What actor and critic have in common: a sharded model, its optimiser and its learning-rate schedule.

An update goes over an iteration's rows `ppo_epochs` times in mini-batches of `ppo_mini_batch_size` prompts, with one
optimiser step each (`update.py`). A mini-batch is a whole number of chunks dealt to the ranks in turn, so it holds the
same rows whatever the number of ranks. Its gradient is normalised by counts over all ranks. Neither ranks nor
micro-batches change the loss or the gradient.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline.config.learner import ActorConfig, CriticConfig
from pipeline.derived import UpdateShape
from pipeline.models.batch import TrainBatch
from pipeline.models.fsdp import clip_grad_norm, shard
from pipeline.models.micro_batches import minimum_parts, split_micro_batches
from pipeline.models.packing import MicroBatch, collate
from pipeline.models.sharing import share_prefixes, shared_size
from pipeline.stats import Stat, Stats, mean
from pipeline.train.optim import build_optimizer, build_scheduler


class Learner(ABC):
    """A sharded model with its optimiser.

    Args:
        name: `actor` or `critic`, the first part of its metrics' names.
        module: the model, equal on every rank, with a `decoder`; it is sharded in place.
        config: its settings: optimiser, schedule, sharding and largest gradient norm.
        shape: how an iteration's rows are divided into steps.
        agg_mode: how token losses become one number, one of `losses.AGG_MODES`.
        device: this rank's device.
        iterations: iterations in which it is updated, for the schedule.
        share_prompts: `model.share_prompts`.
    """

    def __init__(
        self,
        name: str,
        module: Any,
        config: ActorConfig | CriticConfig,
        shape: UpdateShape,
        agg_mode: str,
        device: torch.device,
        iterations: int,
        share_prompts: str,
    ):
        self.name, self.shape, self.device = name, shape, device
        self.grad_clip = config.grad_clip
        self.agg_mode = agg_mode
        self._shared_size = shared_size(share_prompts, module, device)
        self._nonfinite_steps = 0
        self.module = shard(module, config.fsdp, device)
        self.optimizer = build_optimizer(self.module, config.optim)
        self.scheduler = build_scheduler(self.optimizer, config.optim, iterations * shape.steps)

    # What differs between actor and critic.

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the first step waits until old log-probs are computed for all rows of the iteration."""
        return False

    def compute_old_log_probs(self, rows: TrainBatch) -> Stats:
        """Write into `rows` what depends on the weights before the first step; a collective."""
        return {}

    def iteration_metrics(self, rows: TrainBatch) -> Stats:
        """Metrics that need all rows of the iteration; a collective."""
        return {}

    def select_tokens(self, rows: TrainBatch, index: list[int]) -> None:
        """Write into `rows` which tokens of the mini-batch `index` a loss singles out; a collective."""
        return

    def rows_to_train(self, rows: TrainBatch, index: list[int], number: int) -> list[int]:
        """Subset of `index` that needs a forward pass in step `number` of the iteration."""
        return index

    @abstractmethod
    def backward(self, batch: MicroBatch, number: int) -> tuple[Stats, float]:
        """Forward and backward pass of a micro-batch in step `number` of the iteration.

        The loss is not divided by the counts of the mini-batch.

        Returns:
            metrics, of which those of kind `sum` are in proportion to the loss, and the number of tokens of the loss
            mask that the pass rejected.
        """

    # What they have in common.

    def mini_batches(self, rows: TrainBatch) -> Iterator[tuple[int, list[int]]]:
        """`(number, rows)` of each optimiser step of an iteration, numbered from 0 over all epochs."""
        for epoch in range(self.shape.epochs):
            for number, index in enumerate(np.array_split(np.arange(len(rows)), self.shape.mini_batches)):
                yield epoch * self.shape.mini_batches + number, index.tolist()

    def micro_batches(self, rows: TrainBatch, index: list[int]) -> Iterator[MicroBatch]:
        """Micro-batches of the rows `index`. Every rank gets the same number, since each pass is a collective; there is
        none where no rank has rows."""
        budget = self.shape.max_tokens
        packs = share_prefixes(rows, index, budget, self._shared_size)
        lengths = rows.pack_lengths(packs)
        parts = int(self.all_reduce([minimum_parts(lengths, budget)], dist.ReduceOp.MAX)[0])
        for part in split_micro_batches(lengths, budget, parts):
            yield collate(rows, [packs[i] for i in part]).to(self.device)

    def optimizer_step(self, tokens: float, rejected: float) -> Stats:
        """Clip the gradient and take one optimiser step; a collective.

        A step is skipped, and counted, where the gradient is not finite or no token trains.

        Args:
            tokens: tokens of the loss mask, of all ranks.
            rejected: this rank's tokens of the loss mask that the passes rejected.
        """
        norm = clip_grad_norm(self.module.parameters(), self.grad_clip)
        self._check_norm(norm)
        # Every rank sees the same norm and count. Without tokens the gradient is zero, and a step would still decay.
        step = math.isfinite(norm) and tokens > self.all_reduce([rejected])[0]
        stats = {
            f"{self.name}/grad_norm": mean(norm, 1) if math.isfinite(norm) else mean(0, 0),
            f"{self.name}/skipped_steps": Stat("sum", (float(not step) / dist.get_world_size(),)),
            f"{self.name}/lr": Stat("max", (self.optimizer.param_groups[0]["lr"],)),
        }
        if step:
            self.optimizer.step()
            self.scheduler.step()
        return stats

    def _check_norm(self, norm: float) -> None:
        """Raises FloatingPointError, on every rank, where too many steps in a row had no finite gradient."""
        self._nonfinite_steps = 0 if math.isfinite(norm) else self._nonfinite_steps + 1
        if self._nonfinite_steps > self.shape.max_nonfinite_steps:
            raise FloatingPointError(
                f"the gradient norm of the {self.name} was {norm} in {self._nonfinite_steps} optimiser steps in a row, "
                f"more than trainer.max_nonfinite_steps={self.shape.max_nonfinite_steps}; none was taken. Lower "
                f"{self.name}.optim.lr, or compute in float32 ({self.name}.fsdp.param_dtype=null)"
            )

    def restore_schedule(self, steps: int) -> None:
        """Put the learning rate where it stands after `steps` optimiser steps."""
        self.scheduler.last_epoch = steps - 1
        self.scheduler.step()

    def all_reduce(self, values: list[float], op: Any = dist.ReduceOp.SUM) -> list[float]:
        """The values summed (or as `op` says) over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op)
        return tensor.tolist()
