"""What actor and critic have in common: a sharded model, its optimiser, and exact steps over an iteration's rows.

An update goes over an iteration's rows `ppo_epochs` times in mini-batches of `ppo_mini_batch_size` prompts, one
optimiser step each. A mini-batch is a whole number of chunks dealt to the ranks in turn, so it holds the same rows
whatever the number of ranks; its loss is normalised by counts over all ranks before the first backward pass, so neither
ranks nor micro-batches change loss or gradient. Where rows are trained on as they come (`early.py`), the counts are
known at the end alone, and the gradient is divided by them then.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline.config import Config
from pipeline.track.metrics import Stat, Stats, mean, merge
from pipeline.train.config import ActorConfig, CriticConfig, FSDPConfig, OptimConfig
from pipeline.train.fsdp import clip_grad_norm, shard
from pipeline.train.optim import build_optimizer, build_scheduler
from pipeline.train.packing import MicroBatch, Rows, collate, minimum_parts, split_micro_batches
from pipeline.train.sharing import bundles, shared_size


@dataclass(frozen=True)
class UpdateShape:
    """How an iteration's rows are gone over; what the critic leaves open is the actor's."""

    epochs: int
    mini_batches: int
    """Mini-batches of one iteration."""
    max_tokens: int
    """Most tokens in one forward pass of one rank."""
    max_nonfinite_steps: int
    """Optimiser steps in a row whose gradient may not be finite."""

    @classmethod
    def of(cls, config: Config, part: ActorConfig | CriticConfig) -> "UpdateShape":
        actor = config.actor
        size = part.ppo_mini_batch_size or actor.ppo_mini_batch_size or config.data.train_batch_size
        return cls(
            epochs=part.ppo_epochs or actor.ppo_epochs,
            mini_batches=config.data.train_batch_size // size,
            max_tokens=part.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
            max_nonfinite_steps=config.trainer.max_nonfinite_steps,
        )

    @property
    def steps(self) -> int:
        """Optimiser steps of one iteration."""
        return self.epochs * self.mini_batches


Backward = Callable[[MicroBatch, float, float], tuple[Stats, float]]
"""Runs forward and backward on a micro-batch, given the tokens that train and the sequences with such tokens in the
global mini-batch. Returns metrics, of which those of kind `sum` are shares of the loss, and how many of its tokens it
found not to train after all."""


class Learner(ABC):
    """A sharded model with its optimiser.

    Args:
        name: `actor` or `critic`, the first part of its metrics' names.
        module: the model, equal on every rank, with a `decoder`; it is sharded in place.
        shape: how an iteration's rows are gone over.
        optim: optimiser and schedule.
        fsdp: sharding.
        grad_clip: largest gradient norm.
        agg_mode: how token losses become one number, one of `losses.AGG_MODES`.
        device: this rank's device.
        iterations: iterations in which it is updated, for the schedule.
        share_prompts: `model.share_prompts`.
    """

    def __init__(
        self,
        name: str,
        module: Any,
        shape: UpdateShape,
        optim: OptimConfig,
        fsdp: FSDPConfig,
        grad_clip: float,
        agg_mode: str,
        device: torch.device,
        iterations: int,
        share_prompts: bool | None,
    ):
        self.name, self.shape, self.device, self.grad_clip = name, shape, device, grad_clip
        self.agg_mode = agg_mode
        self._shared_size = shared_size(share_prompts, module)
        self._nonfinite_steps = 0
        self.module = shard(module, fsdp, device)
        self.optimizer = build_optimizer(self.module, optim)
        self.scheduler = build_scheduler(self.optimizer, optim, iterations * shape.steps)

    # what actor and critic do each in their way

    @property
    def prepares(self) -> bool:
        """Whether all rows of an iteration must be prepared before its first step."""
        return False

    def prepare(self, rows: Rows) -> Stats:
        """What rows need before any of the iteration's steps, each for itself; a collective."""
        return {}

    def survey(self, rows: Rows, mask: np.ndarray) -> Stats:
        """Metrics that need all rows of the iteration, prepared, with the mask [N] they came with; a collective."""
        return {}

    def passing(self, rows: Rows, index: list[int], number: int) -> list[int]:
        """Of the rows `index` those that go through the model in step `number` of the iteration."""
        return index

    @abstractmethod
    def backward(self, number: int) -> Backward:
        """The backward pass of step `number` of the iteration."""

    def train(self, rows: Rows, index: list[int], number: int) -> Stats:
        """Step `number` of the iteration, on the mini-batch of rows `index`; a collective."""
        return self.step(rows, self.passing(rows, index, number), index, self.backward(number))

    @abstractmethod
    def update(self, rows: Rows) -> Stats:
        """Train on one iteration's rows of this rank; a collective. Returns metrics, to be merged over ranks."""

    # what they have in common

    def mini_batches(self, rows: Rows) -> Iterator[tuple[int, list[int]]]:
        """`(number, rows)` of each optimiser step of an iteration, numbered from 0 over all epochs."""
        for epoch in range(self.shape.epochs):
            for number, index in enumerate(np.array_split(np.arange(len(rows)), self.shape.mini_batches)):
                yield epoch * self.shape.mini_batches + number, index.tolist()

    def micro_batches(self, rows: Rows, index: list[int], least: int = 1) -> Iterator[MicroBatch]:
        """Micro-batches of the rows `index`; every rank gets equally many, since each is a collective.

        There is at least one, an empty one where no rank has rows: AdamW leaves a parameter without a gradient as it
        is, where one with a gradient of zeros goes on by momentum and weight decay. With `least=0` there may be none.
        """
        budget = self.shape.max_tokens
        taken = bundles(rows, index, budget, self._shared_size)
        lengths = rows.bundle_lengths(taken)
        parts = int(self.all_reduce([minimum_parts(lengths, budget)], dist.ReduceOp.MAX)[0])
        for part in split_micro_batches(lengths, budget, max(parts, least)):
            yield collate(rows, [taken[i] for i in part]).to(self.device)

    def step(self, rows: Rows, index: list[int], counted: list[int], backward: Backward) -> Stats:
        """One optimiser step; a collective.

        Args:
            rows: the iteration's rows of this rank.
            index: rows that go through the model.
            counted: rows that count in what the loss is normalised by, `index` among them.
            backward: of a micro-batch.
        """
        tokens, sequences = self.all_reduce(list(rows.mask_counts(counted)), dist.ReduceOp.SUM)
        self.optimizer.zero_grad(set_to_none=True)
        stats, own_rejected = self.accumulate(self.micro_batches(rows, index), backward, tokens, sequences)
        return merge([*stats, self.take(tokens, own_rejected)])

    @staticmethod
    def accumulate(
        batches: Iterable[MicroBatch], backward: Backward, tokens: float, sequences: float
    ) -> tuple[list[Stats], float]:
        """Add the gradients of micro-batches to those that are there; their metrics, and tokens not to train."""
        stats, own_rejected = [], 0.0
        for batch in batches:
            own, rejected = backward(batch, tokens, sequences)
            stats.append(own)
            own_rejected += rejected
        return stats, own_rejected

    def take(self, tokens: float, own_rejected: float) -> Stats:
        """Take the step that the gradients ask for; a collective. One that is not finite is left out and counted.

        Args:
            tokens: that train, of all ranks.
            own_rejected: of this rank's, those that were found not to train after all.
        """
        norm = clip_grad_norm(self.module.parameters(), self.grad_clip)
        self._check_norm(norm)
        # Every rank sees the same norm and count. Without tokens the gradient is zero, and a step would still decay.
        step = math.isfinite(norm) and tokens > self.all_reduce([own_rejected])[0]
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
