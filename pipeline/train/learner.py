"""The common part of actor and critic: a sharded model, its optimiser and its learning-rate schedule.

An update passes over an iteration's rows `ppo_epochs` times in mini-batches of `ppo_mini_batch_size` prompts, with one
optimiser step each (`update.py`). Chunks come to the ranks in turn, a mini-batch is a whole number of chunks, and ranks
exchange rows only within a mini-batch (`deal.py`), so it holds the same rows for any number of ranks. Its gradient is
normalised by counts over all ranks.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.config.learner import ActorConfig, CriticConfig
from pipeline.derived import UpdateShape
from pipeline.greeting import Way
from pipeline.losses import agg_loss
from pipeline.models.batch import TrainBatch
from pipeline.models.fsdp import clip_grad_norm, shard
from pipeline.models.mesh import Mesh
from pipeline.models.micro_batches import minimum_parts, split_micro_batches
from pipeline.models.packing import MicroBatch, collate
from pipeline.models.repeatable import check_repeatable
from pipeline.models.sharing import Passes, pack_rows
from pipeline.stats import Stat, Stats, mean
from pipeline.train import ranks
from pipeline.train.optim import build_optimizer, build_scheduler


class Learner(ABC):
    """A sharded model with its optimiser.

    Args:
        name: `actor` or `critic`, the first part of its metrics' names.
        module: the model, with a `decoder`; it is sharded in place.
        config: the section `actor` or `critic`.
        shape: settings of the update.
        device: this rank's device.
        iterations: number of iterations that update it, for the learning-rate schedule.
        share_prompts: `model.share_prompts`.
        mesh: the ranks that loaded slices of the model. Neighbours that get the same rows compute one learner
            together: metrics are complete without all but the first of them.
    """

    def __init__(
        self,
        name: str,
        module: Any,
        config: ActorConfig | CriticConfig,
        shape: UpdateShape,
        device: torch.device,
        iterations: int,
        share_prompts: str,
        mesh: Mesh,
    ):
        self.name, self.shape, self.device = name, shape, device
        self.mesh, self.grad_clip = mesh, config.grad_clip
        self.passes = Passes.of(module, share_prompts, mesh.sequence_ranks)
        """The passes of rows through the model."""
        self._nonfinite_steps = 0
        self.module = shard(module, config.fsdp, device, mesh)
        check_repeatable(self.module, device)
        self.optimizer = build_optimizer(self.module, config.optim, config.fsdp.offload)
        self.scheduler = build_scheduler(self.optimizer, config.optim, iterations * shape.steps)

    @property
    def shares_prompts(self) -> bool:
        """True if samples share their prompt in a pass."""
        return self.passes.shared

    def take(self, way: Way) -> None:
        """Let rows pass through the model in another way from now on."""
        self.passes = self.passes.taking(way, self.module)

    # Different in actor and critic.

    own_reference = False
    """True if `compute_reference` has something to do."""

    @property
    def needs_old_log_probs(self) -> bool:
        """True if the first step waits until `compute_old_log_probs` has run on all rows of the iteration."""
        return False

    def compute_reference(self, rows: TrainBatch) -> None:
        """Write the log-probs of the reference into `rows`; a collective."""
        return

    def compute_old_log_probs(self, rows: TrainBatch) -> Stats:
        """Write into `rows` the columns that depend on the weights before the first step; a collective."""
        return {}

    def iteration_metrics(self, rows: TrainBatch) -> Stats:
        """Return metrics that need all rows of the iteration; a collective."""
        return {}

    def select_tokens(self, rows: TrainBatch, index: list[int]) -> None:
        """Write into `rows` the tokens of the mini-batch `index` that the loss chooses; a collective."""
        return

    def rows_to_train(self, rows: TrainBatch, index: list[int], number: int) -> list[int]:
        """Select the rows of `index` that need a forward pass in step `number` of the iteration."""
        return index

    @abstractmethod
    def backward(self, batch: MicroBatch, number: int) -> tuple[Stats, float]:
        """Run the forward and backward pass of a micro-batch in step `number` of the iteration.

        Returns:
            metrics, and the number of tokens of the loss mask that the pass rejected. The loss, and metrics of kind
            `sum`, are not divided by the counts of the mini-batch.
        """

    # The same in both.

    def aggregate(self, per_token: Tensor, mask: Tensor, batch: MicroBatch) -> Tensor:
        """Return one loss from losses [N] of the tokens in `mask` [N], not divided by the counts of the mini-batch."""
        shape = self.shape
        return agg_loss(per_token, mask, shape.agg_mode, batch.row_index, batch.sequences, shape.scale_factor)

    def mini_batches(self, rows: TrainBatch) -> Iterator[tuple[int, list[int]]]:
        """Yield `(number, rows)` of each optimiser step of an iteration, numbered from 0 over all epochs."""
        for epoch in range(self.shape.epochs):
            for number, index in enumerate(np.array_split(np.arange(len(rows)), self.shape.mini_batches)):
                yield epoch * self.shape.mini_batches + number, index.tolist()

    def micro_batches(
        self, rows: TrainBatch, index: list[int], whole_rows: bool = False, passes: Passes | None = None
    ) -> Iterator[MicroBatch]:
        """Build micro-batches of the rows `index`, equally many on every rank, since each pass is a collective.

        Args:
            rows: any rows.
            index: numbers of the rows to pack.
            whole_rows: keep the contexts of a row in one micro-batch.
            passes: another model's passes, if the micro-batches are for it.
        """
        passes = passes or self.passes
        budget, packed = self.shape.max_tokens, passes.packed
        packs, units = pack_rows(rows, index, budget, passes.shared, whole_rows)
        lengths = rows.pack_lengths(packs)
        parts = int(self.all_reduce([minimum_parts(lengths, budget, units, packed)], ranks.MAX)[0])
        for part in split_micro_batches(lengths, budget, parts, units, packed):
            yield self.collate(rows, [packs[i] for i in part], passes)

    def collate(self, rows: TrainBatch, packs: list[list[int]], passes: Passes | None = None) -> MicroBatch:
        """Make the micro-batch of these packs, as the model takes it; see `packing.collate`."""
        packed = (passes or self.passes).packed
        return collate(rows, packs, packed=packed, sequence=self.mesh.positions).to(self.device)

    def optimizer_step(self, tokens: float, rejected: float) -> Stats:
        """Clip the gradient and take one optimiser step; a collective.

        A step is skipped, and counted, if the gradient is not finite or no token trains.

        Args:
            tokens: tokens of the loss mask, of all ranks.
            rejected: this rank's tokens of the loss mask that the passes rejected.

        Raises FloatingPointError, on every rank, if too many consecutive gradients were not finite.
        """
        norm = clip_grad_norm(self.module.parameters(), self.grad_clip)
        finite = math.isfinite(norm)
        self._nonfinite_steps = 0 if finite else self._nonfinite_steps + 1
        if self._nonfinite_steps > self.shape.max_nonfinite_steps:
            raise FloatingPointError(
                f"the gradient norm of the {self.name} was {norm} in {self._nonfinite_steps} optimiser steps in a row, "
                f"more than trainer.max_nonfinite_steps={self.shape.max_nonfinite_steps}; none was taken. Lower "
                f"{self.name}.optim.lr, or compute in float32 ({self.name}.fsdp.param_dtype=float32)"
            )
        # Every rank has the same norm and count. Without tokens the gradient is 0, but a step would decay weights.
        step = finite and tokens > self.all_reduce([rejected])[0]
        stats = {
            f"{self.name}/grad_norm": mean(norm, 1) if finite else mean(0, 0),
            f"{self.name}/skipped_steps": Stat("sum", (float(not step) / self.data_ranks,)),
            f"{self.name}/lr": Stat("max", (float(self.optimizer.param_groups[0]["lr"]),)),
        }
        if step:
            self.optimizer.step()
            self.scheduler.step()
        return stats

    def restore_schedule(self, steps: int) -> None:
        """Set the learning rate to its value after `steps` optimiser steps."""
        self.scheduler.last_epoch = steps - 1
        self.scheduler.step()

    def all_reduce(self, values: list[float], op: Any = ranks.SUM) -> list[float]:
        """See `ranks.all_reduce`; ranks with the same rows count as one."""
        reduced = ranks.all_reduce(values, self.device, op)
        return [value / self.mesh.same_rows for value in reduced] if op == ranks.SUM else reduced

    @property
    def data_ranks(self) -> int:
        """Number of ranks, or groups of ranks, that see different rows."""
        return ranks.count() // self.mesh.same_rows

    @property
    def leads(self) -> bool:
        """True if this rank is the first of the ranks that have its rows."""
        return ranks.rank() % self.mesh.same_rows == 0
