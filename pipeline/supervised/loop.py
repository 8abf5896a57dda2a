"""The train worker of the supervised jobs (`jobs.sft`, `jobs.reward_model`, `jobs.dpo`): Ray Train, FSDP2 and Ray Data.

1. The loss is a mean over the global batch. Each micro-batch computes a sum, divided by the count over all ranks, and
   FSDP sums the gradients. So the result does not depend on the number of ranks or on micro-batches.
2. Each rank gets `train_batch_size / num_workers` rows per step, as one block. The ranks get blocks in turn, so step k
   trains on the same rows for any number of ranks.
3. Rows run in micro-batches within a token budget, packed or grouped by length (`models/micro_batches.py`).
4. Checkpoints are written and restored as in an RL run (`train/checkpoint.py`); an iteration is a step. The order of
   rows depends only on seed and epoch, so the number of steps is the place in the data.
"""

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import pyarrow as pa
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config import save_yaml
from pipeline.config.supervised import SupervisedConfig
from pipeline.errors import FinalError
from pipeline.models.fsdp import NotSavedError, clip_grad_norm, rescue, save_hf, shard, try_save
from pipeline.models.mesh import make_mesh
from pipeline.models.micro_batches import minimum_parts, split_micro_batches
from pipeline.models.pretrained import Pretrained
from pipeline.models.repeatable import check_repeatable
from pipeline.models.sharing import Passes
from pipeline.models.tokenizer import load_tokenizer
from pipeline.stats import Stat, Stats, reduce
from pipeline.store.events import AttemptBegun, CheckpointSaved, Event, IterationTrained, Noted, TrainingEnded, Trouble
from pipeline.supervised.data import RowEncoder, RowGroup, held_rows, token_counts
from pipeline.threads import compute_threads
from pipeline.track.performance import memory_metrics
from pipeline.train import ranks
from pipeline.train.checkpoint import NotStored, Saver, staging
from pipeline.train.feed import TimedIterator
from pipeline.train.optim import build_optimizer, build_scheduler
from pipeline.train.reference import ShardedReference
from pipeline.train.restore import restore_own

C = TypeVar("C", bound=SupervisedConfig)
NOTES = "training_notes.txt"
"""File in the folder of a trained model with notes on choices that were made while it was loaded."""
WAIT = "trainer.data_timeout"
"""Key of the time limit of a worker's waits."""
REMEDIES = ("make room, or name another folder (the variable TMPDIR)", "make room, or choose another out")
"""Advice for a lack of room for checkpoints, in the local folder and in `out`."""
RECORDED_S = 60.0
"""Seconds within which the driver must record the steps before a checkpoint."""


@dataclass(frozen=True)
class WorkerSettings(Generic[C]):
    """The arguments of every train worker."""

    loop: "type[SupervisedLoop[C]]"
    """Class of the train loop."""
    config: C
    steps: int
    """Number of optimiser steps."""
    val_groups: list[RowGroup]
    """Row groups of the validation files; empty without validation."""
    progress: Any
    """Handle of the Ray actor `Progress`."""
    done: int = 0
    """Number of steps that the run has done by its checkpoint; the data set `train` begins after their rows."""


@dataclass
class _Model:
    """The sharded model with its optimiser and schedule, as checkpoints take it."""

    name: str
    module: Any
    optimizer: Any
    scheduler: Any


def train_loop(settings: dict[str, WorkerSettings[Any]]) -> None:
    """Run the train loop in a Ray Train worker, as its entry point."""
    config = settings["settings"]
    config.loop(config).run()


class SupervisedLoop(ABC, Generic[C]):
    """The train loop of one train worker. A subclass defines the model and its loss.

    Attributes:
        encoder: class of the encoder that turns rows of files into rows of tokens.
        measured: names of the metrics whose sums `sums` returns; the first one is the loss.
        packed: whether rows lie end to end in a micro-batch, without padding.
        teacher: frozen model that sees the same micro-batches, which `load` may set; None without one.
        first_pass: whether the worker reads the rows of one epoch before training, from the data set `first_pass`.
    """

    encoder: ClassVar[type[RowEncoder[Any]]]
    measured: ClassVar[tuple[str, ...]]
    first_pass: ClassVar[bool] = False
    teacher: ShardedReference | None = None

    def __init__(self, settings: WorkerSettings[C]) -> None:
        self.settings = settings
        self.config = settings.config
        trainer = self.config.trainer
        context = ray.train.get_context()
        self.rank, self.world_size = context.get_world_rank(), context.get_world_size()
        self.device = ray.train.torch.get_device()
        if self.device.type == "cpu":
            torch.set_num_threads(compute_threads(trainer.num_threads, trainer.cpus_per_worker))
        self.block_rows = self.config.data.train_batch_size // self.world_size
        self.rows = self.open("first_pass" if self.first_pass else "train")
        self.tokenizer = load_tokenizer(self.config.model)
        self.mesh = make_mesh(self.device)
        model = self.load()
        passes = Passes.of(model, "never")
        both = self.teacher is None or self.teacher.passes.packed
        self.packed, self.notes = passes.packed and both, passes.notes
        self.model: Any = shard(model, self.config.fsdp, self.device, self.mesh)
        check_repeatable(self.model, self.device)
        self.optimizer = build_optimizer(self.model, self.config.optim, self.config.fsdp.offload)
        self.scheduler = build_scheduler(self.optimizer, self.config.optim, settings.steps)
        self._learners = [_Model("model", self.model, self.optimizer, self.scheduler)]
        encoder = self.encoder.of(self.config.model, self.config.data)
        self.ends = encoder.ends
        self._saver(try_save)(self.config.out or "")
        out, limit, save_settings = self.config.out or "", trainer.data_timeout, partial(save_yaml, self.config)
        self.saver = Saver(out, out, limit, save_settings, self._post_saved, self._say, WAIT, REMEDIES)
        if trainer.save_freq > 0:
            self.saver.check_room(self._learners)
        if self.rank == 0:
            for note in self.notes:
                self._tell(Noted(note))
        limit = self.config.data.val_max_samples
        self.val_rows = held_rows(settings.val_groups, encoder, limit, self.rank, self.world_size)

    def open(self, name: str) -> TimedIterator:
        """Start to read this rank's blocks of the data set `name`. Only one data set may be open at a time, because the
        reader of each holds a CPU."""
        blocks = ray.train.get_dataset_shard(name).iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=1
        )
        hint = "trainer.data_timeout; Ray Data may lack a free CPU for its reader, or the files answer too slowly"
        return TimedIterator(iter(blocks), self.config.trainer.data_timeout, lambda: hint)

    @abstractmethod
    def load(self) -> Pretrained:
        """Load the model; every rank of `self.mesh` reads its slices of the weights."""

    @abstractmethod
    def count(self, table: pa.Table) -> int:
        """Return the count that turns sums over these rows into means, such as the number of trained tokens."""

    @abstractmethod
    def lengths(self, table: pa.Table) -> list[int]:
        """Return the number of tokens of each row in a micro-batch. If rows are padded, padding counts as in a
        micro-batch in which the row is the longest."""

    @abstractmethod
    def sums(self, table: pa.Table, index: list[int]) -> Tensor:
        """Run one micro-batch; returns the sum of each of the K metrics `measured` over its rows, [K].

        Only the first, the loss, has a gradient.

        Args:
            table: rows of this rank.
            index: numbers of the rows of the micro-batch; may be empty.
        """

    def run(self) -> None:
        """Train from the checkpoint, if there is one, to the last step or a request to stop; save the model or a
        checkpoint.

        Raises:
            NotSavedError, FinalError: model or checkpoint could not be saved; the message names the folder that has the
                model.
        """
        try:
            self._run()
        except NotStored as error:
            raise FinalError(rescue(self._saver(save_hf), self._elsewhere, str(error))) from error

    def _run(self) -> None:
        step, steps, stopping = self._restore(), self.settings.steps, False
        test_freq, save_freq = self.config.trainer.test_freq, self.config.trainer.save_freq
        while step < steps and not stopping:
            step, began = step + 1, time.perf_counter()
            table = self.rows.next(f"rows for step {step}")
            if table is None:
                raise RuntimeError(f"the rows ended before step {step}; did a file change while it was read?")
            if len(table) != self.block_rows:
                raise RuntimeError(f"step {step} got {len(table)} rows instead of {self.block_rows}")
            metrics = {"lr": float(self.optimizer.param_groups[0]["lr"]), **self.step(table)}
            seconds = time.perf_counter() - began
            if self.val_rows is not None and (step == steps or (test_freq > 0 and step % test_freq == 0)):
                metrics |= {f"val_{name}": value for name, value in self.validate(self.val_rows).items()}
            stopping = self._report(step, metrics, table, seconds)
            if step < steps and (stopping or (save_freq > 0 and step % save_freq == 0)):
                self._save_checkpoint(step)
        self.saver.wait()
        if step >= steps:
            self.save()
        if self.rank == 0:
            self._post(TrainingEnded(step, step < steps))

    def _restore(self) -> int:
        """Load the newest checkpoint in `out`, if there is one; returns the number of steps done. A collective."""
        progress = restore_own(self._learners, self.config.out or "", self.config.trainer.data_timeout, self._say, WAIT)
        done = progress["version"] if progress else 0
        if done != self.settings.done:
            raise FinalError(
                f"the checkpoint after step {self.settings.done} is damaged; start the same command again, which "
                f"continues from step {done}"
            )
        if progress:
            self.load_state(progress["counts"])
        if self.rank == 0:
            self._tell(AttemptBegun(done))
        return int(done)

    def _report(self, step: int, metrics: dict[str, float], table: pa.Table, seconds: float) -> bool:
        """Post the metrics of a step to the driver; a collective. Returns True if a request to stop has come.

        Args:
            step: number of the step, from 1.
            metrics: metrics of the global batch.
            table: this rank's rows.
            seconds: seconds of the step, with the wait for rows.
        """
        stats: Stats = {
            "perf/total_num_tokens": Stat("sum", (float(sum(token_counts(table))),)),
            **memory_metrics(self.device),
        }
        found = reduce(ranks.all_gather(stats))
        found |= {
            "timing_s/step": seconds,
            "perf/throughput": found["perf/total_num_tokens"] / seconds / self.world_size,
        }
        return bool(ranks.broadcast(self.rank == 0 and self._post(IterationTrained(step, metrics | found))))

    def _save_checkpoint(self, step: int) -> None:
        """Begin to save a checkpoint; a collective."""
        counts = self.state()
        if self.rank == 0:
            # A run that continues from it does not report the steps before it again.
            ray.get(self.settings.progress.flush.remote(RECORDED_S), timeout=2 * RECORDED_S)
        self.saver.write(self._learners, step, {"counts": counts})

    def state(self) -> dict[str, Any]:
        """Return what the loop counts over the whole run, as JSON, for a checkpoint; a collective."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the counts that `state` returned when the checkpoint was saved."""

    def _post(self, event: Event) -> bool:
        """Post an event to the driver, and wait for the answer. Returns True if the run shall stop."""
        return bool(ray.get(self._tell(event), timeout=self.config.trainer.data_timeout))

    def _tell(self, event: Event) -> Any:
        """Post an event to the driver; returns the reference to the answer."""
        return self.settings.progress.post.remote(event)

    def _say(self, text: str) -> None:
        self._tell(Trouble(text))

    def _post_saved(self, version: int) -> None:
        self._tell(CheckpointSaved(version, self.rank, self.world_size))

    def step(self, table: pa.Table) -> dict[str, float]:
        """Take one optimiser step on this rank's rows; returns the metrics of the global batch. A collective."""
        self.optimizer.zero_grad(set_to_none=True)
        total, metrics = self._pass(table, learn=True)
        norm = clip_grad_norm(self.model.parameters(), self.config.trainer.grad_clip)
        if not math.isfinite(norm):
            raise RuntimeError(f"the gradient norm is {norm}; lower optim.lr or compute in float32")
        # Without anything to learn the gradient is zero, and a step would still decay the weights.
        if total:
            self.optimizer.step()
        self.scheduler.step()
        return {**metrics, "grad_norm": norm}

    def validate(self, table: pa.Table) -> dict[str, float]:
        """Compute the metrics over all ranks' rows without training; `table` has this rank's. A collective."""
        with torch.no_grad():
            return self._pass(table, learn=False)[1]

    def means(self, sums: list[float], total: float, rows: int) -> dict[str, float]:
        """Compute the metrics of a batch.

        Args:
            sums: sums of the metrics `measured`, over all ranks.
            total: sum of `count`, over all ranks.
            rows: number of rows, over all ranks.
        """
        return {name: value / max(total, 1.0) for name, value in zip(self.measured, sums, strict=True)}

    def save(self) -> None:
        """Save the model and its tokenizer.

        Raises:
            NotSavedError: `out` cannot be written. If the model was saved in another folder, the message names it.
        """
        out = Path(self.config.out or "")
        save = self._saver(save_hf)
        try:
            save(out)
            if self.rank == 0 and self.notes:
                with suppress(OSError):  # the console has them, and the model is there
                    (out / NOTES).write_text("\n".join([*self.notes, ""]))
        except NotSavedError as error:
            raise NotSavedError(rescue(save, self._elsewhere, str(error))) from error

    @property
    def _elsewhere(self) -> tuple[str, str]:
        """Folders for the model if `out` cannot be written."""
        out = Path(self.config.out or "")
        name = f"{out.name}-{os.getpid()}"
        return str(out.with_name(name)), f"{staging()}/{name}"

    def _saver(self, save: Callable[..., None]) -> Callable[[str | Path], None]:
        """Return `save` (`save_hf` or `try_save`) with the model and its tokenizer as arguments: a function of a
        folder."""
        # A reward model does not generate.
        ends = self.ends if self.model.lm.can_generate() else ()
        return partial(save, self.model, self.tokenizer, ends=ends, into=True)

    def check_kept(self, dropped: float, rows: str) -> None:
        """Raise RuntimeError if all rows of the run were left out.

        Args:
            dropped: number of rows that were left out.
            rows: word for them in the error, such as "pairs".
        """
        data = self.config.data
        if dropped == self.settings.steps * data.train_batch_size:
            raise RuntimeError(f"all {rows} were left out: none fits into data.max_length={data.max_length}; raise it")

    def _pass(self, table: pa.Table, learn: bool) -> tuple[float, dict[str, float]]:
        """Run the model over this rank's rows; returns the sum of `count` and the metrics, over all ranks.

        A collective: every rank runs the same number of micro-batches.

        Args:
            table: rows of this rank.
            learn: whether to run in training mode and accumulate gradients.
        """
        self.model.train(learn)
        total = self._reduce(self.count(table), dist.ReduceOp.SUM)
        sums = torch.zeros(len(self.measured), dtype=torch.float64, device=self.device)
        for index in self.micro_batches(self.lengths(table)):
            part = self.sums(table, index)
            if learn:
                (part[0] / max(total, 1.0)).backward()
            sums += part.detach()
        dist.all_reduce(sums)
        return total, self.means(sums.tolist(), total, int(self._reduce(len(table), dist.ReduceOp.SUM)))

    def micro_batches(self, lengths: list[int]) -> list[list[int]]:
        """Divide rows into micro-batches, the same number on every rank; a collective.

        Args:
            lengths: number of tokens of each row.

        Returns:
            row numbers of each micro-batch.
        """
        budget = self.config.trainer.max_token_len_per_gpu
        parts = int(self._reduce(minimum_parts(lengths, budget, packed=self.packed), dist.ReduceOp.MAX))
        return split_micro_batches(lengths, budget, parts, packed=self.packed)

    def _reduce(self, value: int, op: Any) -> float:
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op)
        return tensor.item()
