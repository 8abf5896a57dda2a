"""Settings of the training run (`trainer.*`)."""

import importlib.util
import os
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.bounds import setting


@dataclass
class DeadlineConfig:
    """Longest waits in seconds; a wait beyond them ends the run with a sentence."""

    engine_start: float = setting(900.0, above=0)
    """Until an engine has loaded its model, and until `agent.min_hosts` hosts have loaded your files."""

    admission: float = setting(1800.0, above=0)
    """A chunk's wait for the policy version that may generate it."""

    chunk: float = setting(1800.0, above=0)
    """The generation of one chunk."""

    rows: float = setting(3600.0, above=0)
    """The trainer's wait for the next chunk of rows."""

    publish: float = setting(600.0, above=0)
    """Until all ranks have published their weights, after the first."""

    checkpoint: float = setting(1800.0, above=0)
    """Copying a checkpoint to storage, or reading one."""

    train_start: float = setting(3600.0, above=0)
    """Until the train workers have begun, at the start or after a failure."""

    collective: float = setting(5400.0, above=0)
    """A train worker's wait for the others in a collective operation; above `rows` and `checkpoint`."""

    store: float = setting(120.0, above=0)
    """Until a policy store that died has started again."""


PLACED = ("prompts", "rollout", "agent", "reward", "train", "reward_model", "reference", "value", "policy")
"""Stages that `trainer.placement` may name; `reward` means all tasks without an actor of their own."""

LONGEST_NAME = 200
"""Bytes of a run's name, which files with longer names begin with; a disk takes 255."""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with options of torch's allocator."""

FILES = ("model", "prompts", "code")
"""Kinds of files that a run reads."""

LOGGERS = {"console": "rich", "mlflow": "mlflow", "wandb": "wandb", "tensorboard": "tensorboard"}
"""Tracker: the Python package it needs."""


@dataclass
class TrainerConfig:
    """The run: how long, how wide, what is kept."""

    project_name: str = "slipstream"
    """MLflow experiment (wandb project)."""

    experiment_name: str = "run"
    """Name of the run; its folder is `default_local_dir/experiment_name`."""

    default_local_dir: str = setting("runs", path="files")
    """Folder of all runs."""

    seed: int = 1
    """Seed of prompt order, sampling and all other random choices."""

    total_epochs: int = setting(1, at_least=1)
    """Passes over the training prompts."""

    total_training_steps: int | None = setting(None, at_least=1)
    """Number of iterations; overrides `total_epochs`."""

    num_workers: int = setting(1, at_least=1)
    """Ray Train workers (FSDP ranks)."""

    use_gpu: bool = False
    """Give each train worker a GPU."""

    gpus_per_worker: float = setting(1.0, above=0, at_most=1)
    """Ray GPUs of a train worker with `use_gpu`; below 1, engines or replicas can share the GPU."""

    cpus_per_worker: float = setting(1, at_least=0)
    """Ray CPUs of a train worker."""

    num_threads: int = setting(0, at_least=0)
    """Compute threads of a CPU train worker; 0 takes `cpus_per_worker`."""

    stream_gradients: bool | None = None
    """Accumulate gradients over the first chunks of an iteration while others are generated; the result is the same up
    to rounding. Null: if possible (see `--dry-run`)."""

    ray_num_cpus: int | None = setting(None, at_least=1)
    """CPUs of a local Ray; null takes the machine's. May exceed them, since phases of an on-policy run alternate."""

    object_store_gb: float | None = setting(None, above=0)
    """GiB of a local Ray's object store; null leaves it to Ray."""

    val_before_train: bool = True
    """Validate the initial policy."""

    test_freq: int = setting(-1, at_least=1, or_value=-1)
    """Iterations between validations; -1: only before and after training."""

    save_freq: int = setting(-1, at_least=1, or_value=-1)
    """Iterations between checkpoints; -1: only at the end and at Ctrl-C."""

    max_ckpt_to_keep: int = setting(2, at_least=1)
    """Newest checkpoints kept."""

    best_metric: str | None = None
    """Validation metric, such as `val-core/countdown/acc/mean@1`, whose best checkpoint is kept too. Only versions that
    are validated and saved count."""

    best_metric_mode: str = setting("max", choices=("max", "min"))
    """Whether the largest (`max`) or smallest (`min`) `best_metric` is best."""

    resume: str = setting("auto", path="resume")
    """`auto` continues the run of this name from its checkpoint; `never` refuses an existing run; a folder or URL of a
    checkpoint, or of a run, begins a new run with the weights of its actor and critic, and nothing else of it
    ([reliability.md](reliability.md#a-new-run-from-a-policy))."""

    accept_changed: list[str] = field(default_factory=list)
    """Kinds of files that may have changed since the run began, any of `model`, `prompts` and `code`; a run is not
    continued with others ([reliability.md](reliability.md#the-same-files))."""

    storage_path: str | None = setting(None, path="files")
    """Folder or URL for checkpoints, at `STORAGE_PATH/experiment_name/checkpoints`; null: the run's folder."""

    max_failures: int = setting(3, at_least=-1)
    """Restarts of the train workers without a new checkpoint between them, before the run ends; -1: any number
    ([reliability.md](reliability.md#restarts-of-the-train-workers))."""

    max_nonfinite_steps: int = setting(10, at_least=0)
    """Optimiser steps in a row that may have a gradient that is not finite; they are left out, and one more ends the
    run."""

    max_log_prob_gap: float | None = setting(None, infinite=True, above=0)
    """Largest difference between engine's and trainer's log-prob of a token; above it the run ends. Null only reports
    it."""

    handshake: str = setting("refuse", choices=("refuse", "warn"))
    """If engine and trainer give other log-probs for the same rows before the first iteration, and no other attention
    and no other form of rows helps: `refuse` ends the run, `warn` trains nevertheless."""

    logger: list[str] = field(default_factory=lambda: ["console", "mlflow"])
    """Trackers of the metrics, besides `metrics.jsonl`: any of `console`, `mlflow`, `wandb`, `tensorboard`."""

    log_samples: int = setting(8, at_least=0)
    """Sample trajectories in the tracker's table, per validation and per 10 iterations."""

    log_traces: int = setting(2, at_least=0, at_most=100)
    """Rows of each iteration, and of each validation, that MLflow gets as [traces](trace.md#look-at-rows)."""

    weight_bucket_mb: int = setting(64, at_least=1)
    """MiB of weights that travel as one buffer; the next one is stored or fetched while one is filled or loaded."""

    weight_transport: str = setting("object_store", choices=("object_store", "nixl"))
    """How weights reach an engine: through Ray's `object_store`, or with `nixl` (`pip install nixl`) out of the train
    workers' memory, which keeps `algorithm.max_staleness + 2` copies; no GPU has run it yet."""

    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)

    env_vars: dict[str, Any] = field(default_factory=dict)
    """Environment variables of all workers."""

    placement: dict[str, dict[str, str]] = field(default_factory=dict)
    """Node labels of a stage: `trainer.placement.rollout.role=gpu` keeps engines on nodes started with `ray start
    --labels role=gpu` ([clusters.md](clusters.md#nodes-of-different-kinds))."""

    @property
    def gpus(self) -> float:
        """Ray GPUs of one train worker."""
        return self.gpus_per_worker if self.use_gpu else 0.0

    def placed(self, stage: str) -> dict[str, str] | None:
        """Labels of the nodes that the stage may run on; None for any node."""
        return self.placement.get(stage) or None

    def problems(self) -> dict[str, object]:
        """Sentences on settings that exclude each other, and whether each applies (see `sentences`)."""
        name, waits, nixl = self.experiment_name, self.deadlines, self.weight_transport == "nixl"
        first_rows = waits.engine_start + waits.chunk
        table: dict[str, object] = {
            f"trainer.experiment_name={name!r:.50} names the run's folder; it may not be empty, hold a slash, or have "
            f"more than {LONGEST_NAME} bytes": name in ("", ".", "..")
            or "/" in name
            or len(name.encode()) > LONGEST_NAME,
            "{trainer.best_metric} needs versions that are validated and saved; set {trainer.test_freq} and "
            "{trainer.save_freq} to numbers of iterations, one a multiple of the other": (
                self.best_metric is not None and min(self.save_freq, self.test_freq) < 1
            ),
            "{trainer.deadlines.rows} is shorter than trainer.deadlines.engine_start + trainer.deadlines.chunk = "
            f"{waits.engine_start:g} + {waits.chunk:g} = {first_rows:g} seconds, which the first rows may take": (
                waits.rows < first_rows
            ),
            "{trainer.deadlines.collective} must be above {trainer.deadlines.rows} and {trainer.deadlines.checkpoint}: "
            "one train worker may wait that long while the others wait for it; raise it": (
                waits.collective <= max(waits.rows, waits.checkpoint)
            ),
            "{trainer.gpus_per_worker}: Ray could give two of {trainer.num_workers} one GPU, which NCCL refuses; "
            "set it above 0.5, such as 0.6 beside rollout.num_gpus=0.4": (
                self.use_gpu and self.num_workers > 1 and self.gpus_per_worker <= 0.5
            ),
            "{trainer.weight_transport} needs the Python package nixl on every node: "
            "pip install 'slipstream-rl[nixl]'": (nixl and importlib.util.find_spec("nixl") is None),
        }
        variables = {f"{name} of the environment": os.environ.get(name, "") for name in ALLOCATOR}
        variables |= {f"trainer.env_vars.{variable}": value for variable, value in self.env_vars.items()}
        for variable, value in variables.items():
            sentence = f"{{trainer.weight_transport}} cannot register memory of {variable}={value}"
            table[f"{sentence}; leave one of them out"] = nixl and "expandable_segments:true" in str(value).lower()
        for stage in self.placement:
            sentence = f"trainer.placement.{stage}: there is no such stage; there are: {', '.join(PLACED)}"
            table[sentence] = stage not in PLACED
        for kind in self.accept_changed:
            sentence = f"trainer.accept_changed: {kind} is no kind of files; it may hold {', '.join(FILES)}"
            table[sentence] = kind not in FILES
        for logger in self.logger:
            package = LOGGERS.get(logger)
            table[f"trainer.logger: {logger} is not known; it may hold {', '.join(LOGGERS)}"] = package is None
            sentence = (
                f"trainer.logger={logger} needs the Python package {package}: pip install 'slipstream-rl[{logger}]'"
            )
            table[sentence] = package is not None and importlib.util.find_spec(package) is None
        return table
