"""What `python -m jobs.sft` and `python -m jobs.reward_model` have in common: the driver of a supervised run."""

import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
import ray.data
import ray.train
from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipeline import cluster
from pipeline.config import ConfigError, load
from pipeline.prompts.chat import load_tokenizer
from pipeline.schema import keys
from pipeline.train.optim import SHAPES
from pipeline.train.supervised import Settings, SupervisedLoop, train_loop
from pipeline.train.supervised_config import SupervisedConfig
from pipeline.train.supervised_data import RowGroup, find_row_groups, train_dataset

POLL_S = 0.5
PLAIN_LINE_S = 10.0
ANSWER_S = 60.0
# Beside the workers: one for the reader, one for what Ray Data does with its blocks.
DATA_CPUS = 2

C = TypeVar("C", bound=SupervisedConfig)


class Board:
    """The actor that holds the newest metrics."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def post(self, metrics: dict[str, float]) -> None:
        """Lay `metrics` over those that are known."""
        self.metrics |= metrics

    def read(self) -> dict[str, float]:
        """The newest value of each metric."""
        return self.metrics


@dataclass(frozen=True)
class Job(Generic[C]):
    """A command that trains a model on rows of files."""

    name: str
    """Of the module in `jobs`, and of the file in `configs`."""

    about: str
    """What `--help` says above the settings."""

    schema: type[C]
    """All settings."""

    loop: type[SupervisedLoop[C]]
    """The train worker."""

    problems: Callable[[C], list[str]]
    """Sentences about settings of this command that cannot work."""

    shown: tuple[str, ...]
    """Metrics in the progress line."""

    def main(self, argv: list[str] | None = None) -> int:
        """Runs the command and returns its exit code."""
        argv = sys.argv[1:] if argv is None else argv
        command = f"python -m jobs.{self.name}"
        if {"-h", "--help"} & set(argv):
            print(self.help())
            return 0
        try:
            config = load(self.schema, argv, self.name)
            metrics = self.run(config)
        except ValueError as error:
            print(f"{command}: {error}", file=sys.stderr)
            return 2
        except (TimeoutError, ray.exceptions.RayError, ray.train.TrainingFailedError, OSError) as error:
            from pipeline.train.run import sentence

            print(f"{command}: the run failed: {sentence(error)}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"{command}: interrupted, no model was saved", file=sys.stderr)
            return 130
        print(f"{config.out}: {metrics['step']:.0f} steps, {self.describe(metrics)}")
        return 0

    def help(self) -> str:
        """What the command does and all its settings."""
        from jobs.docs_configuration import default, descriptions

        lines = [self.about.strip(), "", "settings:"]
        for key in keys(self.schema).values():
            text = descriptions(key.owner)[key.name.rpartition(".")[2]].replace("`", "")
            lines.append(f"  {key.name}={default(key)}")
            lines += textwrap.wrap(text, 100, initial_indent="      ", subsequent_indent="      ")
        return "\n".join(lines)

    def describe(self, metrics: dict[str, float]) -> str:
        """The metrics as a short text."""
        parts = [f"{name} {metrics[name]:.3f}" for name in self.shown if name in metrics]
        parts += [f"{name} {metrics[name]:,.0f}" for name in ("dropped", "val_dropped") if metrics.get(name)]
        return " ".join([*parts, f"{metrics['tokens_per_s']:,.0f} tokens/s"])

    def check(self, config: C) -> None:
        """Raises ConfigError where settings cannot work, before anything is started."""
        data, trainer = config.data, config.trainer
        problems = []
        if not config.out:
            problems.append("out is not set; give the folder for the trained model.")
        elif Path(config.out).exists() and not (Path(config.out) / "config.json").exists() and os.listdir(config.out):
            problems.append(f"out={config.out} exists and holds no model; choose another folder or remove it.")
        counts: tuple[tuple[str, int | None, int], ...] = (
            ("data.train_batch_size", data.train_batch_size, 1),
            ("data.max_length", data.max_length, 2),
            ("trainer.num_workers", trainer.num_workers, 1),
            ("trainer.total_epochs", trainer.total_epochs, 1),
            ("trainer.num_threads", trainer.num_threads, 0),
            ("trainer.total_training_steps", trainer.total_training_steps, 1),
        )
        for key, value, least in counts:
            if value is not None and value < least:
                problems.append(f"{key}={value} must be at least {least}.")
        amounts = (
            ("trainer.grad_clip", trainer.grad_clip),
            ("trainer.data_timeout", trainer.data_timeout),
            ("trainer.start_timeout", trainer.start_timeout),
            ("trainer.cpus_per_worker", trainer.cpus_per_worker),
        )
        for name, amount in amounts:
            if amount <= 0:
                problems.append(f"{name}={amount} must be above 0.")
        if data.truncation not in self.loop.encoder.truncations:
            allowed = ", ".join(self.loop.encoder.truncations)
            problems.append(f"data.truncation={data.truncation} is unknown; use one of {allowed}.")
        if config.optim.lr_scheduler_type not in SHAPES:
            problems.append(
                f"optim.lr_scheduler_type={config.optim.lr_scheduler_type} is unknown; use {', '.join(SHAPES)}."
            )
        if trainer.num_workers > 0 and data.train_batch_size % trainer.num_workers:
            problems.append(
                f"data.train_batch_size={data.train_batch_size} does not divide among trainer.num_workers="
                f"{trainer.num_workers}: {data.train_batch_size} / {trainer.num_workers} leaves "
                f"{data.train_batch_size % trainer.num_workers} rows."
            )
        problems += self.problems(config)
        if problems:
            raise ConfigError("\n".join(problems))

    def run(self, config: C) -> dict[str, float]:
        """Train and save; returns the last metrics.

        Raises:
            ConfigError, ValueError: settings, files or model cannot be used.
            TimeoutError, ray.exceptions.RayError, ray.train.TrainingFailedError: the run failed.
        """
        self.check(config)
        config.model.path = cluster.absolute(config.model.path)
        config.model.tokenizer_path = cluster.absolute(config.model.tokenizer_path)
        out = Path(config.out or "").resolve()
        config.out = str(out)
        data, trainer = config.data, config.trainer
        data.train_files = cluster.absolute_files(data.train_files)
        data.val_files = cluster.absolute_files(data.val_files)
        train_groups = self._row_groups(config, "train_files")
        val_groups = self._row_groups(config, "val_files") if data.val_files else []
        steps, epochs = plan(config, train_groups)
        load_tokenizer(config.model)
        _start_ray(config)
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(trainer.start_timeout)

        board: Any = ray.remote(num_cpus=0)(Board)
        board = board.remote()
        block_rows = data.train_batch_size // trainer.num_workers
        # Without an order blocks come as they are finished, and the run could not be repeated.
        options = ray.data.ExecutionOptions(preserve_order=True)
        stream = train_dataset(train_groups, self.loop.encoder, config.model, data, trainer.seed, epochs, block_rows)
        stream.context.enable_progress_bars = False
        storage = f".{out.name}.ray-train"
        resources = {"CPU": trainer.cpus_per_worker}
        fit = TorchTrainer(
            train_loop,
            train_loop_config={"settings": Settings(self.loop, config, steps, val_groups, board)},
            torch_config=TorchConfig(timeout_s=int(trainer.data_timeout)),
            scaling_config=ScalingConfig(
                num_workers=trainer.num_workers,
                use_gpu=trainer.use_gpu,
                resources_per_worker={**resources, "GPU": 1} if trainer.use_gpu else resources,
            ),
            datasets={"train": stream},
            dataset_config=DataConfig(execution_options=options),
            run_config=RunConfig(
                name=storage,
                storage_path=str(out.parent),
                failure_config=FailureConfig(max_failures=0),
            ),
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        done = threading.Event()
        line = threading.Thread(target=self._show, args=(board, steps, done), name="progress", daemon=True)
        line.start()
        try:
            fit.fit()
        except SystemExit as stopped:
            # On Ctrl-C Ray Train aborts the workers and leaves with exit code 0, as if the model were there.
            raise KeyboardInterrupt from stopped
        finally:
            done.set()
            line.join(timeout=ANSWER_S)
            shutil.rmtree(out.parent / storage, ignore_errors=True)
        return dict(ray.get(board.read.remote(), timeout=ANSWER_S))

    def _row_groups(self, config: C, name: str) -> list[RowGroup]:
        data = config.data
        return find_row_groups(
            getattr(data, name), f"data.{name}", lambda schema: self.loop.encoder.problem(schema, data)
        )

    def _show(self, board: Any, steps: int, done: threading.Event) -> None:
        """The progress line; on a terminal a bar, elsewhere a plain line now and then."""
        console = Console(stderr=True)
        columns = (
            TextColumn(self.name),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task, printed = progress.add_task(self.name, total=steps, numbers="starting"), time.monotonic()
            while not done.wait(POLL_S):
                try:
                    metrics = ray.get(board.read.remote(), timeout=POLL_S)
                except ray.exceptions.GetTimeoutError:
                    continue  # a busy machine answers a moment later; the run itself does not depend on it
                if not metrics:
                    continue
                progress.update(task, completed=metrics["step"], numbers=self.describe(metrics))
                if not console.is_terminal and time.monotonic() - printed >= PLAIN_LINE_S:
                    printed = time.monotonic()
                    print(f"{self.name} {metrics['step']}/{steps} {self.describe(metrics)}", flush=True)


def plan(config: SupervisedConfig, groups: list[RowGroup]) -> tuple[int, int]:
    """Optimiser steps of the run and the passes over the data they take.

    Raises:
        ConfigError: there are fewer rows than one batch.
    """
    rows, batch = sum(group.rows for group in groups), config.data.train_batch_size
    steps = config.trainer.total_training_steps or rows * config.trainer.total_epochs // batch
    if steps == 0:
        raise ConfigError(
            f"data.train_files holds {rows} rows, less than one data.train_batch_size={batch}; lower it or give more."
        )
    return steps, -(-steps * batch // rows)


def _start_ray(config: SupervisedConfig) -> None:
    trainer = config.trainer
    needed = round(trainer.num_workers * trainer.cpus_per_worker + 0.5) + DATA_CPUS
    if not cluster.start(trainer.ray_num_cpus or max(os.cpu_count() or 1, needed), None, {}):
        return
    have = ray.cluster_resources()
    for name, key, want in (
        ("CPU", "trainer.cpus_per_worker", trainer.num_workers * trainer.cpus_per_worker + 1),
        ("GPU", "trainer.use_gpu", trainer.num_workers if trainer.use_gpu else 0),
    ):
        if have.get(name, 0) < want:
            raise ConfigError(
                f"the run needs {want:g} {name}s (trainer.num_workers={trainer.num_workers} with {key}, and 1 CPU for "
                f"the reader), but Ray has {have.get(name, 0):g}; lower trainer.num_workers or add nodes."
            )
