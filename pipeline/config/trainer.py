"""Settings of the training run (`trainer.*`)."""

import importlib.util
import os
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.bounds import setting


@dataclass
class DeadlineConfig:
    """Time limits, in seconds. If one is exceeded, the run ends with an error that names its key."""

    engine_start: float = setting(900.0, above=0)
    """Time limit, in seconds, for the start of an engine with its model, and for the start of `agent.min_hosts` hosts
    with the files of your code."""

    admission: float = setting(1800.0, above=0)
    """Time limit, in seconds, for the wait of a chunk until a policy version that may generate it is published. The
    time is counted again from 0 after any progress of the run."""

    chunk: float = setting(1800.0, above=0)
    """Time limit, in seconds, for the generation of one chunk."""

    rows: float = setting(3600.0, above=0)
    """Time limit, in seconds, for the wait of the trainer for the next chunk of rows."""

    publish: float = setting(600.0, above=0)
    """Time limit, in seconds, for the publication of weights, from the first train worker to the last."""

    checkpoint: float = setting(1800.0, above=0)
    """Time limit, in seconds, for the copying of a checkpoint to storage or from storage."""

    train_start: float = setting(3600.0, above=0)
    """Time limit, in seconds, for the start of the train workers, at the beginning or after a failure."""

    collective: float = setting(5400.0, above=0)
    """Time limit, in seconds, for the wait of a train worker for the others in a collective operation. Must be above
    `rows` and `checkpoint`."""

    store: float = setting(120.0, above=0)
    """Time limit, in seconds, for the restart of a policy store (the actor that admits chunks and versions) that
    died."""


PLACED = ("prompts", "rollout", "agent", "reward", "train", "reward_model", "reference", "teacher", "value", "policy")
"""Stages that `trainer.placement` may name; `reward` stands for all Ray tasks outside of actors."""

LONGEST_NAME = 200
"""Maximum length of a run's name, in bytes. Names of files begin with it, and file systems allow 255 bytes."""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names of the environment variables with options of torch's allocator."""

FILES = ("model", "prompts", "code")
"""Kinds of input files of a run: values of `trainer.accept_changed`."""

LOGGERS = {
    "console": ("rich", "pip install rich"),
    "mlflow": ("mlflow", "pip install mlflow"),
    "wandb": ("wandb", "pip install wandb"),
    "tensorboard": ("tensorboard", "pip install tensorboard"),
}
"""Trackers by name, each with the Python package that it needs and the command that installs the package."""


@dataclass
class TrainerConfig:
    """Training run: length, resources, checkpoints, tracking."""

    project_name: str = "slipstream"
    """Name of the MLflow experiment or wandb project."""

    experiment_name: str = "run"
    """Name of the run. Its folder is `default_local_dir/experiment_name`."""

    default_local_dir: str = setting("runs", path="files")
    """Folder of all runs."""

    seed: int = 1
    """Seed of prompt order, sampling and all other random choices."""

    total_epochs: int = setting(1, at_least=1)
    """Number of passes over the training prompts."""

    total_training_steps: int | None = setting(None, at_least=1)
    """Total number of iterations; if set, `total_epochs` is ignored."""

    num_workers: int = setting(1, at_least=1)
    """Number of Ray Train workers (FSDP ranks)."""

    use_gpu: bool = False
    """Give each train worker a GPU."""

    gpus_per_worker: float = setting(1.0, above=0, at_most=1)
    """Ray GPUs of one train worker, with `use_gpu`. Below 1, engines or replicas can share the GPU."""

    cpus_per_worker: float = setting(1, at_least=0)
    """Ray CPUs of one train worker."""

    num_threads: int = setting(0, at_least=0)
    """Number of compute threads of a CPU train worker. 0 takes `cpus_per_worker`."""

    stream_gradients: bool | None = None
    """Compute gradients of the first chunks of an iteration while the others are generated; the result is the same up
    to rounding. Null: true if the other settings allow it (`--dry-run` shows whether)."""

    ray_num_cpus: int | None = setting(None, at_least=1)
    """Number of CPUs that a local Ray reports. Null takes the machine's number. A larger number is allowed, since
    generation and training of an on-policy run alternate."""

    object_store_gb: float | None = setting(None, above=0)
    """Size of the object store of a local Ray, in GiB. Null takes Ray's default."""

    val_before_train: bool = True
    """Validate the initial policy."""

    test_freq: int = setting(-1, at_least=1, or_value=-1)
    """Number of iterations between validations. -1: only before and after training."""

    save_freq: int = setting(-1, at_least=1, or_value=-1)
    """Number of iterations between checkpoints. -1: only at the end and at Ctrl-C."""

    max_ckpt_to_keep: int = setting(2, at_least=0)
    """Number of checkpoints to keep, from the newest on. 0: one until the run has finished and saved its model, then
    none, so the run cannot be made longer."""

    best_metric: str | None = None
    """Validation metric, such as `val-core/countdown/acc/mean@1`. The checkpoint with the best value is kept too, out
    of the policy versions that are both validated and saved."""

    best_metric_mode: str = setting("max", choices=("max", "min"))
    """Best value of `best_metric`: the largest (`max`) or the smallest (`min`)."""

    resume: str = setting("auto", path="resume")
    """Start of the run. `auto`: continue the run with this name from its newest checkpoint, if it exists. `never`: end
    with an error if the run exists. A folder or URL of a checkpoint or of another run: begin a new run with the weights
    of that actor and critic, and nothing else ([clusters.md](clusters.md#a-new-run-from-a-policy))."""

    accept_changed: list[str] = field(default_factory=list)
    """Kinds of files that may have changed since the run began: any of `model`, `prompts` and `code`. With other
    changes, a run is not continued ([clusters.md](clusters.md#the-same-files))."""

    storage_path: str | None = setting(None, path="files")
    """Folder or URL for checkpoints, which go to `STORAGE_PATH/experiment_name/checkpoints`. Null: the run's folder."""

    max_failures: int = setting(3, at_least=-1)
    """Maximum number of restarts of the train workers without a new checkpoint between them; one more failure ends the
    run. -1: no limit ([clusters.md](clusters.md#restarts-of-the-train-workers))."""

    max_nonfinite_steps: int = setting(10, at_least=0)
    """Maximum number of consecutive optimiser steps with a gradient that is not finite. These steps are skipped; one
    more ends the run."""

    max_log_prob_gap: float | None = setting(None, infinite=True, above=0)
    """Maximum difference between the log-probs of the engine and of the trainer for one token. A larger difference ends
    the run. Null: differences are only reported."""

    handshake: str = setting("refuse", choices=("refuse", "warn"))
    """Reaction if engine and trainer give different log-probs for the same rows before the first iteration, and another
    attention implementation or no packing does not help. `refuse` ends the run, `warn` trains nevertheless."""

    logger: list[str] = field(default_factory=lambda: ["console", "mlflow"])
    """Trackers of metrics, in addition to `metrics.jsonl`: any of `console`, `mlflow`, `wandb`, `tensorboard`."""

    log_samples: int = setting(8, at_least=0)
    """Number of rows in the trackers' table of samples, per validation and per 10 iterations."""

    log_traces: int = setting(2, at_least=0, at_most=100)
    """Number of rows that are written to MLflow as [traces](monitoring.md#mlflow), per iteration and per validation."""

    weight_bucket_mb: int = setting(64, at_least=1)
    """Size of the buffers in which weights are sent to the engines, in MiB. The next buffer is stored or fetched while
    one is filled or loaded."""

    weight_transport: str = setting("object_store", choices=("object_store", "nixl"))
    """Transport of weights to the engines. `object_store`: Ray's object store. `nixl` (`pip install nixl`): engines
    read the memory of the train workers, which keep `algorithm.max_staleness + 2` copies of the weights; it has not run
    on a GPU yet."""

    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)

    env_vars: dict[str, Any] = field(default_factory=dict)
    """Environment variables of all workers."""

    placement: dict[str, dict[str, str]] = field(default_factory=dict)
    """Node labels by stage: `trainer.placement.rollout.role=gpu` keeps engines on nodes started with `ray start
    --labels role=gpu` ([clusters.md](clusters.md#nodes-of-different-kinds))."""

    @property
    def gpus(self) -> float:
        """Ray GPUs of one train worker."""
        return self.gpus_per_worker if self.use_gpu else 0.0

    def placed(self, stage: str) -> dict[str, str] | None:
        """Return the labels that a node must have to run the stage `stage`; None if it may run on any node."""
        return self.placement.get(stage) or None

    def problems(self) -> dict[str, object]:
        """Return sentences on settings that exclude each other, each with a true value if it applies."""
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
            "{trainer.gpus_per_worker}: Ray could give two of {trainer.num_workers} one GPU, which NCCL refuses; set "
            "it above 0.5, such as 0.6 with rollout.num_gpus=0.4": (
                self.use_gpu and self.num_workers > 1 and self.gpus_per_worker <= 0.5
            ),
            "{trainer.weight_transport} needs the Python package nixl on every node: pip install nixl": (
                nixl and importlib.util.find_spec("nixl") is None
            ),
        }
        variables = {f"{name} of the environment": os.environ.get(name, "") for name in ALLOCATOR}
        variables |= {f"trainer.env_vars.{variable}": value for variable, value in self.env_vars.items()}
        for variable, value in variables.items():
            sentence = f"{{trainer.weight_transport}} cannot register memory of {variable}={value}"
            table[f"{sentence}; leave one of them out"] = nixl and "expandable_segments:true" in str(value).lower()
        for stage in self.placement:
            sentence = f"trainer.placement.{stage}: this stage does not exist; choose one of {', '.join(PLACED)}"
            table[sentence] = stage not in PLACED
        for kind in self.accept_changed:
            sentence = f"trainer.accept_changed: {kind} is not a kind of file; choose from {', '.join(FILES)}"
            table[sentence] = kind not in FILES
        return table | logger_problems(self.logger)


def logger_problems(names: list[str]) -> dict[str, object]:
    """Return sentences on the trackers `trainer.logger`, each with a true value if it applies."""
    table: dict[str, object] = {}
    for name in names:
        table[f"trainer.logger: {name} is unknown; choose from {', '.join(LOGGERS)}"] = name not in LOGGERS
        if name in LOGGERS:
            package, command = LOGGERS[name]
            sentence = f"trainer.logger={name} needs the Python package {package}: {command}"
            table[sentence] = importlib.util.find_spec(package) is None
    return table
