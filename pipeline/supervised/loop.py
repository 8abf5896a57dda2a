"""The train worker of the supervised jobs (`jobs.sft`, `jobs.reward_model`, `jobs.dpo`): Ray Train, FSDP2 and Ray Data.

1. The loss is a mean over the global batch. Each micro-batch computes a sum, divided by the count over all ranks, and
   FSDP sums the gradients. So the result does not depend on the number of ranks or on micro-batches.
2. Each rank gets `train_batch_size / num_workers` rows per step, as one block. The ranks get blocks in turn, so step k
   trains on the same rows for any number of ranks.
3. Rows run in micro-batches within a token budget, packed or grouped by length (`models/micro_batches.py`).
"""

import math
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.supervised import SupervisedConfig
from pipeline.models.fsdp import NotSavedError, clip_grad_norm, rescue, save_hf, shard, try_save
from pipeline.models.mesh import make_mesh
from pipeline.models.micro_batches import minimum_parts, split_micro_batches
from pipeline.models.pretrained import Pretrained
from pipeline.models.repeatable import check_repeatable
from pipeline.models.sharing import Passes
from pipeline.models.tokenizer import load_tokenizer
from pipeline.supervised.data import RowEncoder, RowGroup, held_rows
from pipeline.threads import compute_threads
from pipeline.train.feed import TimedIterator
from pipeline.train.optim import build_optimizer, build_scheduler

C = TypeVar("C", bound=SupervisedConfig)
NOTES = "training_notes.txt"
"""File in the folder of a trained model with notes on choices that were made while it was loaded."""


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
    """Handle of the Ray actor that shows metrics (`post`) and notes (`note`) to the user."""


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
        first_pass: whether the worker reads the rows of one epoch before training, from the data set `first_pass`.
    """

    encoder: ClassVar[type[RowEncoder[Any]]]
    measured: ClassVar[tuple[str, ...]]
    first_pass: ClassVar[bool] = False

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
        self.packed, self.notes = passes.packed, passes.notes
        if self.rank == 0:
            settings.progress.note.remote(passes.notes)
        self.model: Any = shard(model, self.config.fsdp, self.device, self.mesh)
        check_repeatable(self.model, self.device)
        self.optimizer = build_optimizer(self.model, self.config.optim, self.config.fsdp.offload)
        self.scheduler = build_scheduler(self.optimizer, self.config.optim, settings.steps)
        encoder = self.encoder.of(self.config.model, self.config.data)
        self.ends = encoder.ends
        self._saver(try_save)(self.config.out or "")
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
        """Train for all steps, with validation every `trainer.test_freq` steps and after the last; save the model."""
        steps = self.settings.steps
        test_freq = self.config.trainer.test_freq
        tokens_seen = 0
        start = time.perf_counter()
        for step in range(1, steps + 1):
            table = self.rows.next(f"rows for step {step}")
            if table is None:
                raise RuntimeError(f"the rows ended before step {step}; did a file change while it was read?")
            if len(table) != self.block_rows:
                raise RuntimeError(f"step {step} got {len(table)} rows instead of {self.block_rows}")
            metrics = {"step": step, "lr": float(self.optimizer.param_groups[0]["lr"]), **self.step(table)}
            tokens_seen += self.tokens(table)
            metrics["tokens_per_s"] = tokens_seen / (time.perf_counter() - start)
            if self.val_rows is not None and (step == steps or (test_freq > 0 and step % test_freq == 0)):
                metrics |= {f"val_{name}": value for name, value in self.validate(self.val_rows).items()}
            if self.rank == 0:
                posted = self.settings.progress.post.remote(metrics)
        if self.rank == 0:
            ray.get(posted, timeout=self.config.trainer.data_timeout)
        self.save()

    def tokens(self, table: pa.Table) -> int:
        """Estimate the number of tokens in all ranks' rows from the number in this rank's rows, `table`."""
        columns = [table[name] for name in table.column_names if name.endswith("_ids")]
        return self.world_size * sum(pc.sum(pc.list_value_length(column)).as_py() for column in columns)

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
            name = f"{out.name}-{os.getpid()}"
            folders = (str(out.with_name(name)), f"{tempfile.gettempdir()}/{name}")
            raise NotSavedError(rescue(save, folders, str(error))) from error

    def _saver(self, save: Callable[..., None]) -> Callable[[str | Path], None]:
        """Return `save` (`save_hf` or `try_save`) with the model and its tokenizer as arguments: a function of a
        folder."""
        # A reward model does not generate.
        ends = self.ends if self.model.lm.can_generate() else ()
        return partial(save, self.model, self.tokenizer, ends=ends)

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
