"""Settings that `python -m jobs.sft` and `python -m jobs.reward_model` have in common."""

from dataclasses import dataclass, field
from typing import Any

from pipeline.train.config import FSDPConfig, ModelConfig, OptimConfig


def _optim() -> OptimConfig:
    return OptimConfig(lr=1e-5, lr_scheduler_type="cosine", lr_warmup_steps_ratio=0.05, min_lr_ratio=0.1)


@dataclass
class SupervisedDataConfig:
    """Which rows are learnt (`data.*`)."""

    train_files: Any = None
    """Parquet files: one path, folder, glob or URL that pyarrow opens, or a list of them."""

    val_files: Any = None
    """Files whose metrics are measured, like `train_files`. Null: no validation."""

    train_batch_size: int = 64
    """Rows per optimiser step, over all workers."""

    max_length: int = 2048
    """Longest conversation in tokens."""

    truncation: str = "error"
    """What happens to a longer one."""

    shuffle: bool = True
    """Mix row groups, and rows within them, anew in each epoch."""

    val_max_samples: int = -1
    """Measure only the first so many rows; -1 takes all."""

    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments for the tokenizer's `apply_chat_template`."""


@dataclass
class SupervisedTrainerConfig:
    """How long, how wide, where to (`trainer.*`)."""

    total_epochs: int = 1
    """Passes over the training data."""

    total_training_steps: int | None = None
    """Optimiser steps in all; overrides `total_epochs` when set."""

    seed: int = 1
    """Seed of the data's order."""

    num_workers: int = 1
    """Ray Train workers (FSDP ranks). Their number changes the speed, not the result."""

    use_gpu: bool = False
    """Give each worker one GPU."""

    cpus_per_worker: float = 1
    """Ray CPUs of one worker."""

    num_threads: int = 0
    """Compute threads of one CPU worker; 0 takes `cpus_per_worker`."""

    ray_num_cpus: int | None = None
    """CPUs a local Ray is told it has; null takes the machine's, or what the workers and the data need where that is
    more. Ignored when a cluster is joined."""

    max_token_len_per_gpu: int = 16384
    """Most tokens (padding counted) in one forward pass of one worker; conversations are grouped by length to fit."""

    grad_clip: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""

    test_freq: int = -1
    """Steps between measurements of the validation metrics; -1: only at the end."""

    data_timeout: float = 600.0
    """Longest wait in seconds for the next rows and for other workers."""

    start_timeout: float = 600.0
    """Longest wait in seconds until all workers have started."""


@dataclass
class SupervisedConfig:
    """All settings of a run."""

    out: str | None = None
    """Folder the model is saved in; on a cluster one that all nodes see."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model that is trained."""

    optim: OptimConfig = field(default_factory=_optim)
    """Optimiser and schedule."""

    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""

    data: SupervisedDataConfig = field(default_factory=SupervisedDataConfig)
    """Which rows are learnt."""

    trainer: SupervisedTrainerConfig = field(default_factory=SupervisedTrainerConfig)
    """How long, how wide."""
