"""The common part of actor and critic: a sharded model, its optimiser and its learning-rate schedule.

An update passes over an iteration's rows `ppo_epochs` times in mini-batches of `ppo_mini_batch_size` prompts, with one
optimiser step for each mini-batch (`update.py`). The ranks get chunks in turn, a mini-batch is a whole number of
chunks, and ranks exchange rows only within a mini-batch (`deal.py`). So a mini-batch holds the same rows for any number
of ranks. The gradient of a mini-batch is divided by counts over all ranks.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.config.learner import ActorConfig, CriticConfig
from pipeline.derived import UpdateShape
from pipeline.greeting import Way
from pipeline.losses import agg_loss
from pipeline.models.backend import MicroBatches
from pipeline.models.batch import TrainBatch
from pipeline.models.mesh import Mesh
from pipeline.models.micro_batches import minimum_parts, split_micro_batches
from pipeline.models.packing import MicroBatch, collate
from pipeline.models.sharing import Passes, pack_rows
from pipeline.stats import Stat, Stats, mean
from pipeline.train import ranks
from pipeline.train.strategy import ReadyModel


class Learner(ABC):
    """A sharded model with its optimiser.

    Args:
        name: `actor` or `critic`, the first part of the names of its metrics.
        prepared: the model, ready to train.
        config: the section `actor` or `critic`.
        shape: settings of the update.
        device: this rank's device.
        mesh: the ranks of the model.
    """

    def __init__(
        self,
        name: str,
        prepared: ReadyModel,
        config: ActorConfig | CriticConfig,
        shape: UpdateShape,
        device: torch.device,
        mesh: Mesh,
    ):
        self.name, self.shape, self.device = name, shape, device
        self.mesh, self.grad_clip = mesh, config.grad_clip
        self.passes = prepared.passes
        """The form in which rows pass through the model."""
        self._nonfinite_steps = 0
        self.on_pass: Callable[[str], None] = lambda name: None
        """Called before each pass of a micro-batch, with the learner's name."""
        self.module = prepared.module
        self.optimizer, self.scheduler, self.backend = prepared.optimizer, prepared.scheduler, prepared.backend

    @property
    def shares_prompts(self) -> bool:
        """True if samples share their prompt in a pass."""
        return self.passes.shared

    def take(self, way: Way) -> None:
        """Let rows pass through the model in the form and with the attention of `way` from now on."""
        self.passes = self.passes.taking(way, self.module)

    # Different in actor and critic.

    replays_routes = False
    """True if the model takes the experts in the rows."""
    own_reference = False
    """True if `compute_reference` has something to do, for a reference or a teacher."""

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
        """Write columns into `rows` that the loss computes in advance over the whole mini-batch `index`; a
        collective."""
        return

    def rows_to_train(self, rows: TrainBatch, index: list[int], number: int) -> list[int]:
        """Return the rows of `index` that need a forward pass in step `number` of the iteration."""
        return index

    @abstractmethod
    def forward(self, batch: MicroBatch, number: int, hidden: Tensor | None = None) -> Any:
        """Pass a micro-batch through the model in step `number` of the iteration, and return the model's output.

        Args:
            batch: the micro-batch.
            number: number of the step.
            hidden: hidden states of the stage before; None in the first stage of a pipeline, and without one.
        """

    @abstractmethod
    def compute_loss(self, rows: TrainBatch, batch: MicroBatch, found: Any, number: int) -> tuple[Tensor, Stats, float]:
        """Compute the loss of a micro-batch of `rows` from the model's output `found` in step `number`.

        Returns:
            the loss, metrics, and the number of tokens in the loss mask that the off-policy correction rejected. The
            loss, and metrics of kind `sum`, are not divided by the counts of the mini-batch yet.
        """

    # The same in both.

    def run(self, rows: TrainBatch, batches: Sequence[MicroBatch], number: int) -> list[tuple[Stats, float]]:
        """Run the forward and backward passes of micro-batches of `rows` in step `number`; a collective.

        Returns metrics of each micro-batch, and its number of rejected tokens, as from `compute_loss`; none, and 0, in
        all stages of a pipeline but the last.
        """

        def loss(batch: MicroBatch, found: Any) -> tuple[Tensor, tuple[Stats, float]]:
            value, stats, rejected = self.compute_loss(rows, batch, found, number)
            return value, (stats, rejected)

        def forward(batch: MicroBatch, hidden: Tensor | None = None) -> Any:
            return self.forward(batch, number, hidden)

        return [found or ({}, 0.0) for found in self.backend.run(batches, forward, loss)]

    def aggregate(self, per_token: Tensor, mask: Tensor, batch: MicroBatch) -> Tensor:
        """Sum the losses of a micro-batch by `loss_agg_mode`, not divided by the counts of the mini-batch yet.

        Args:
            per_token: [N] losses.
            mask: [N] 1 if the token counts.
            batch: the micro-batch.
        """
        shape = self.shape
        return agg_loss(per_token, mask, shape.agg_mode, batch.row_index, batch.sequences, shape.scale_factor)

    def mini_batches(self, rows: TrainBatch) -> Iterator[tuple[int, list[int]]]:
        """Yield (step number, row numbers) for each optimiser step of an iteration; steps count from 0 over all
        epochs."""
        for epoch in range(self.shape.epochs):
            for number, index in enumerate(np.array_split(np.arange(len(rows)), self.shape.mini_batches)):
                yield epoch * self.shape.mini_batches + number, index.tolist()

    def micro_batches(
        self, rows: TrainBatch, index: list[int], whole_rows: bool = False, passes: Passes | None = None
    ) -> MicroBatches:
        """Divide the rows `index` into micro-batches, as many on every rank, since each pass is a collective.

        Args:
            rows: the rows.
            index: numbers of the rows to put into micro-batches.
            whole_rows: whether all contexts of a row must be in one micro-batch.
            passes: form of the rows for another model, such as the reference; None for this learner's.
        """
        passes = passes or self.passes
        budget, packed = self.shape.max_tokens, passes.packed
        packs, units = pack_rows(rows, index, budget, passes.shared, whole_rows)
        lengths = rows.pack_lengths(packs)
        parts = int(self.all_reduce([minimum_parts(lengths, budget, units, packed)], ranks.MAX)[0])
        divided = split_micro_batches(lengths, budget, parts, units, packed)

        def build(chosen: list[list[int]]) -> MicroBatch:
            self.on_pass(self.name)
            return self.collate(rows, chosen, passes)

        return MicroBatches([[packs[i] for i in part] for part in divided], build)

    def collate(self, rows: TrainBatch, packs: list[list[int]], passes: Passes | None = None) -> MicroBatch:
        """Build the micro-batch of `packs` (lists of context numbers) on this rank's device; see `packing.collate`."""
        packed = (passes or self.passes).packed
        reader = getattr(self.module, "image_reader", None)
        place = reader and reader.place
        return collate(rows, packs, packed=packed, sequence=self.mesh.positions, place_images=place).to(self.device)

    def optimizer_step(self, tokens: float, rejected: float) -> Stats:
        """Clip the gradient and take one optimiser step; a collective.

        The step is skipped, and counted as skipped, if the gradient is not finite or no token trains. Returns metrics.

        Args:
            tokens: number of tokens in the loss mask, over all ranks.
            rejected: number of this rank's tokens in the loss mask that `compute_loss` reported as rejected.

        Raises FloatingPointError, on every rank, if too many consecutive gradients were not finite.
        """
        norm = self.backend.clip(self.grad_clip)
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
            self.backend.step()
            self.scheduler.step()
        return stats

    def all_reduce(self, values: list[float], op: Any = ranks.SUM) -> list[float]:
        """Reduce over all ranks, as `ranks.all_reduce`, but sum only the values of ranks that lead (`leads`)."""
        if op == ranks.SUM and not self.leads:
            values = [0.0] * len(values)
        return ranks.all_reduce(values, self.device, op)

    @property
    def data_ranks(self) -> int:
        """Number of ranks, or groups of `mesh.same_rows` ranks, that process different rows."""
        return ranks.count() // self.mesh.same_rows

    @property
    def leads(self) -> bool:
        """True if this rank's metrics count, for all ranks that process the same rows."""
        return self.mesh.leads(ranks.rank())
