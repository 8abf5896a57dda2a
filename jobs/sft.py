"""Supervised fine-tuning: `python -m jobs.sft out=DIR model.path=MODEL data.train_files=FILES [key=value ...]`.

Conversations come as chat messages in parquet; the assistant's tokens are learnt. All keys with their defaults stand in
`pipeline/train/sft_config.py`.

    python -m jobs.sft out=models/warm model.path=models/tiny data.train_files=data/sft_train.parquet optim.lr=2e-3
    ray job submit -- python -m jobs.sft out=/shared/warm model.path=Qwen/Qwen2.5-0.5B trainer.num_workers=8 \\
        trainer.use_gpu=true data.train_files=s3://bucket/sft/
"""

import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

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
from pipeline.train.optim import SHAPES
from pipeline.train.sft import SFTSettings, train_loop
from pipeline.train.sft_config import SFTConfig
from pipeline.train.sft_data import RowGroup, row_groups, train_dataset

POLL_S = 0.5
PLAIN_LINE_S = 10.0
ANSWER_S = 60.0
# Beside the workers: one for the reader, one for what Ray Data does with its blocks.
DATA_CPUS = 2


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


def check(config: SFTConfig) -> None:
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
        ("trainer.logits_chunk_tokens", trainer.logits_chunk_tokens, 1),
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
    if data.truncation not in ("error", "right"):
        problems.append(f"data.truncation={data.truncation} is unknown; use error or right.")
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
    if data.max_length > trainer.max_token_len_per_gpu:
        problems.append(
            f"data.max_length={data.max_length} is more than trainer.max_token_len_per_gpu="
            f"{trainer.max_token_len_per_gpu}, so the longest row would fit in no forward pass; raise the latter."
        )
    if problems:
        raise ConfigError("\n".join(problems))


def plan(config: SFTConfig, groups: list[RowGroup]) -> tuple[int, int]:
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


def run(config: SFTConfig) -> dict[str, float]:
    """Train and save; returns the last metrics.

    Raises:
        ConfigError, ValueError: settings, files or model cannot be used.
        TimeoutError, ray.exceptions.RayError, ray.train.TrainingFailedError: the run failed.
    """
    check(config)
    config.model.path = cluster.absolute(config.model.path)
    out = Path(config.out or "").resolve()
    config.out = str(out)
    data, trainer = config.data, config.trainer
    data.train_files = cluster.absolute_files(data.train_files)
    data.val_files = cluster.absolute_files(data.val_files)
    train_groups = row_groups(data.train_files, "data.train_files", data.messages_key)
    val_groups = row_groups(data.val_files, "data.val_files", data.messages_key) if data.val_files else []
    steps, epochs = plan(config, train_groups)
    load_tokenizer(config.model)
    _start_ray(config)
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(trainer.start_timeout)

    board: Any = ray.remote(num_cpus=0)(Board)
    board = board.remote()
    block_rows = data.train_batch_size // trainer.num_workers
    # Without an order blocks come as they are finished, and the run could not be repeated.
    options = ray.data.ExecutionOptions(preserve_order=True)
    stream = train_dataset(train_groups, config.model, data, trainer.seed, epochs, block_rows)
    stream.context.enable_progress_bars = False
    storage = f".{out.name}.ray-train"
    resources = {"CPU": trainer.cpus_per_worker}
    fit = TorchTrainer(
        train_loop,
        train_loop_config={"settings": SFTSettings(config, steps, val_groups, board)},
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
    line = threading.Thread(target=_show, args=(board, steps, done), name="progress", daemon=True)
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


def _start_ray(config: SFTConfig) -> None:
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


def _show(board: Any, steps: int, done: threading.Event) -> None:
    """The progress line; on a terminal a bar, elsewhere a plain line now and then."""
    console = Console(stderr=True)
    columns = (
        TextColumn("sft"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task, printed = progress.add_task("sft", total=steps, numbers="starting"), time.monotonic()
        while not done.wait(POLL_S):
            try:
                metrics = ray.get(board.read.remote(), timeout=POLL_S)
            except ray.exceptions.GetTimeoutError:
                continue  # a busy machine answers a moment later; the run itself does not depend on it
            if not metrics:
                continue
            progress.update(task, completed=metrics["step"], numbers=describe(metrics))
            if not console.is_terminal and time.monotonic() - printed >= PLAIN_LINE_S:
                printed = time.monotonic()
                print(f"sft {metrics['step']}/{steps} {describe(metrics)}", flush=True)


def describe(metrics: dict[str, float]) -> str:
    """The metrics as a short text."""
    parts = [f"{name} {metrics[name]:.3f}" for name in ("loss", "val_loss") if name in metrics]
    return " ".join([*parts, f"{metrics['tokens_per_s']:,.0f} tokens/s"])


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    try:
        config = load(SFTConfig, sys.argv[1:] if argv is None else argv, "sft")
        metrics = run(config)
    except ValueError as error:
        print(f"python -m jobs.sft: {error}", file=sys.stderr)
        return 2
    except (TimeoutError, ray.exceptions.RayError, ray.train.TrainingFailedError, OSError) as error:
        print(f"python -m jobs.sft: the run failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("python -m jobs.sft: interrupted, no model was saved", file=sys.stderr)
        return 130
    print(f"{config.out}: {metrics['step']:.0f} steps, {describe(metrics)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
