"""One learner's update in one iteration: accumulates gradients part by part, and takes each step as early as possible.

    part arrives ─► recompute old log-probs ─► forward and backward, not normalised    while other parts are generated
    mini-batch complete ─► divide the gradient by the counts of the mini-batch ─► step

With `trainer.stream_gradients` a part is a chunk of rows, else the whole iteration. Both give the same numbers up to
rounding:

1. A loss is a sum divided by a count, such as the number of trained tokens, of the whole mini-batch. The count is known
   only when the mini-batch is complete. So gradients of the sum are accumulated, and divided once before the step.
2. Only rows of the current mini-batch add to the gradient, because a step changes the weights for all later rows.
3. If old log-probs are recomputed, the first step waits until this is done for all parts, and mini-batches after the
   first train when the iteration is complete. Epochs after the first do so in any case.

`pipeline.derived.why_not_streamed` lists the settings that need the whole iteration at once.
"""

import copy
from collections.abc import Sequence

import numpy as np

from pipeline.losses import agg_divisor
from pipeline.models.batch import TrainBatch
from pipeline.models.packing import MicroBatch
from pipeline.stats import Stat, Stats, merge
from pipeline.train.learner import Learner
from pipeline.train.report import timed


class GradAccumulator:
    """The gradient of one optimiser step, accumulated over the rows of a mini-batch.

    Args:
        learner: the learner; its gradients are cleared here, and accumulated until `step`.
        number: number of the step in the iteration, from 0.
    """

    def __init__(self, learner: Learner, number: int):
        self._learner, self._number = learner, number
        self._stats: list[Stats] = []
        self._rejected = 0.0
        self._counts = np.zeros(2)
        learner.backend.zero()

    def add(self, rows: TrainBatch, index: list[int]) -> None:
        """Add the gradient of the rows with the numbers `index`, all of the step's mini-batch; a collective."""
        learner = self._learner
        learner.select_tokens(rows, index)
        trained = learner.rows_to_train(rows, index, self._number)
        self._run(rows, learner.micro_batches(rows, trained, learner.shape.whole_rows))
        self._counts += rows.mask_counts(index)

    def step(self, rows: TrainBatch) -> Stats:
        """Divide the gradient by the counts of the mini-batch, and take the step; a collective. Returns metrics.

        Args:
            rows: any rows, such as those given to `add`; needed if this rank has no row to train.
        """
        learner = self._learner
        if not self._stats:
            # AdamW skips a parameter without a gradient, but moves one with a gradient of 0 by its momentum.
            self._run(rows, [learner.collate(rows, [])])
        tokens, sequences = learner.all_reduce(self._counts.tolist())
        factor = 1.0 / agg_divisor(learner.shape.agg_mode, tokens, sequences)
        learner.backend.scale(factor)
        stats = {
            name: Stat("sum", (stat.values[0] * factor,)) if stat.kind == "sum" else stat
            for name, stat in merge(self._stats).items()
        }
        return merge([stats, learner.optimizer_step(tokens, self._rejected)])

    def _run(self, rows: TrainBatch, batches: Sequence[MicroBatch]) -> None:
        for stats, rejected in self._learner.run(rows, batches, self._number):
            self._stats.append(stats)
            self._rejected += rejected


class StreamedUpdate:
    """One learner's update in one iteration: `add` for each part of the rows, then `finish`.

    Args:
        learner: actor or critic.
        parts: number of parts of the iteration; equal on every rank, and 1 or a multiple of the number of mini-batches.
    """

    def __init__(self, learner: Learner, parts: int):
        self.learner = learner
        self._parts_per_step = parts // learner.shape.mini_batches
        """Number of parts in one mini-batch; 0 if one part holds several mini-batches."""
        self._parts: list[TrainBatch] = []
        self._stats: list[Stats] = []
        self.rows: TrainBatch
        """All rows of the iteration, set by `finish`."""
        self._steps = 0
        self._open: GradAccumulator | None = None
        self._timings: Stats = {}

    def add(self, rows: TrainBatch) -> None:
        """Add the next part of the rows, and train on it as far as possible already; a collective."""
        # The actor's correction changes the loss mask, which must not reach the critic.
        rows = copy.copy(rows)
        learner, position = self.learner, len(self._parts)
        if not learner.replays_routes:
            rows.routes = None
        self._parts.append(rows)
        with timed(self._timings, "ref"):
            learner.compute_reference(rows)
        with timed(self._timings, "old_log_prob"):
            self._stats.append(learner.compute_old_log_probs(rows))
        with timed(self._timings, f"update_{learner.name}"):
            if self._parts_per_step and position // self._parts_per_step == self._steps:
                self._open = self._open or GradAccumulator(learner, self._steps)
                self._open.add(rows, list(range(len(rows))))
                if len(self._parts) == (self._steps + 1) * self._parts_per_step and not learner.needs_old_log_probs:
                    self._step(rows)

    def finish(self) -> Stats:
        """Take the remaining steps after all parts were added; a collective. Returns this rank's metrics."""
        learner = self.learner
        with timed(self._timings, "old_log_prob"):
            rows = self.rows = TrainBatch.concat(self._parts)
            self._stats.append(learner.iteration_metrics(rows))
        with timed(self._timings, f"update_{learner.name}"):
            if self._open:
                self._step(rows)
            for number, index in learner.mini_batches(rows):
                if number == self._steps:
                    self._open = GradAccumulator(learner, number)
                    self._open.add(rows, index)
                    self._step(rows)
        if not learner.needs_old_log_probs:
            del self._timings["timing_s/old_log_prob"]
        if not learner.own_reference:
            del self._timings["timing_s/ref"]
        return merge([*self._stats, self._timings])

    def _step(self, rows: TrainBatch) -> None:
        assert self._open is not None
        self._stats.append(self._open.step(rows))
        self._open = None
        self._steps += 1
