"""An update that begins before its rows are complete: chunk by chunk, with the loss and gradient of the whole.

    chunk comes ─► prepare it ─► forward and backward, not normalised          while the rest is generated
    last chunk  ─► ... ─► divide the gradient by the counts of the mini-batch ─► step ─► the other mini-batches

A loss is a sum over tokens or sequences divided by a number of the whole mini-batch, such as its tokens that train.
That number is known when the mini-batch is complete. Dividing is linear, so the gradients of the parts are added up
undivided, and divided once. What is left is rounding: parts are other micro-batches than those of the whole.

Only a step that has all its rows is taken, and only rows of the mini-batch that is open add to a gradient. Where old
log-probs are recomputed, they are those of the weights before the first step: chunks of later mini-batches are prepared
as they come, and the first step waits for all of them. What keeps a run from all this stands in `pipeline/overlap.py`.
"""

import time

import numpy as np
import torch

from pipeline.track.metrics import Stat, Stats, merge
from pipeline.train.learner import Learner
from pipeline.train.losses import agg_divisor
from pipeline.train.packing import Rows


class OpenStep:
    """An optimiser step whose mini-batch is still coming.

    Args:
        learner: whose step it is; its gradients are the step's until it is taken.
        number: of the step in the iteration.
    """

    def __init__(self, learner: Learner, number: int):
        self._learner, self._number = learner, number
        self._stats: list[Stats] = []
        self._rejected, self._passes = 0.0, 0
        self._counts = np.zeros(2)
        learner.optimizer.zero_grad(set_to_none=True)

    def add(self, rows: Rows) -> None:
        """Add the gradient of prepared rows; a collective."""
        index = list(range(len(rows)))
        self._pass(rows, self._learner.passing(rows, index, self._number), least=0)
        self._counts += rows.mask_counts(index)

    def _pass(self, rows: Rows, index: list[int], least: int) -> None:
        learner = self._learner
        batches = learner.micro_batches(rows, index, least)
        stats, rejected = learner.accumulate(batches, learner.backward(self._number), 1.0, 1.0)
        self._stats += stats
        self._rejected += rejected
        self._passes += len(stats)

    def take(self, rows: Rows) -> Stats:
        """Take the step; a collective. Every chunk of the mini-batch must have been added, `rows` is any of them."""
        learner = self._learner
        if not self._passes:
            # Without a pass no parameter has a gradient, see `micro_batches`.
            self._pass(rows, [], least=1)
        tokens, sequences = learner.all_reduce(self._counts.tolist())
        share = 1.0 / agg_divisor(learner.agg_mode, tokens, sequences)
        with torch.no_grad():
            for parameter in learner.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(share)
        stats = {
            name: Stat("sum", (stat.values[0] * share,)) if stat.kind == "sum" else stat
            for name, stat in merge(self._stats).items()
        }
        return merge([stats, learner.take(tokens, self._rejected)])


class EarlyUpdate:
    """One learner's update in one iteration.

    Args:
        learner: actor or critic.
        chunks: chunks of this rank in the iteration; every rank has as many.
    """

    def __init__(self, learner: Learner, chunks: int):
        self._learner, self._per_mini_batch = learner, chunks // learner.shape.mini_batches
        self._parts: list[Rows] = []
        self._masks: list[np.ndarray] = []
        self._stats: list[Stats] = []
        self._steps = 0
        self._open: OpenStep | None = None
        self._preparing = self._training = 0.0

    def add(self, rows: Rows) -> None:
        """The next chunk; a collective."""
        begun = time.perf_counter()
        self._masks.append(rows.mask)
        self._stats.append(self._learner.prepare(rows))
        self._preparing += time.perf_counter() - begun
        begun = time.perf_counter()
        number = len(self._parts) // self._per_mini_batch
        self._parts.append(rows)
        if number == self._steps:
            self._open = self._open or OpenStep(self._learner, number)
            self._open.add(rows)
            if len(self._parts) == (number + 1) * self._per_mini_batch and not self._learner.prepares:
                self._take()
        self._training += time.perf_counter() - begun

    def finish(self) -> Stats:
        """Take the steps that are left, now that all chunks are there; a collective. Metrics as those of `update`."""
        learner, begun = self._learner, time.perf_counter()
        rows = Rows.join(self._parts)
        self._stats.append(learner.survey(rows, np.concatenate(self._masks)))
        self._preparing += time.perf_counter() - begun
        begun = time.perf_counter()
        if self._open:
            self._take()
        for number, index in learner.mini_batches(rows):
            if number >= self._steps:
                self._stats.append(learner.train(rows, index, number))
        self._training += time.perf_counter() - begun
        own = {f"timing_s/update_{learner.name}": Stat("max", (self._training,))}
        if learner.prepares:
            own["timing_s/old_log_prob"] = Stat("max", (self._preparing,))
        return merge([*self._stats, own])

    def _take(self) -> None:
        assert self._open is not None
        self._stats.append(self._open.take(self._parts[0]))
        self._open = None
        self._steps += 1
