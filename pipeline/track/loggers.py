"""Trackers in addition to `metrics.jsonl`: the protocol of a logger, the list of loggers, wandb and TensorBoard.

A logger's methods run in the thread of a `RetryQueue`. If the tracker does not answer, they raise, and are called again
with the same arguments. If the tracker can never accept the record, they raise `Rejected`.
"""

import difflib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from pipeline.config.trainer import LOGGERS
from pipeline.track.history import write_atomically
from pipeline.track.provenance import flattened, git_commit, masked, versions


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run for trackers."""

    folder: Path
    """The run's folder, in which the ids of the tracker runs are stored."""
    config: Mapping[str, Any]
    """The settings; trackers get them with secrets masked."""
    project: str
    """Name of the MLflow experiment or the wandb project."""
    name: str
    resume: bool = False
    """True to continue the tracker runs with the ids in the folder."""
    store_of: Path | None = None
    """Folder of the run with the local MLflow store to use without a server; None takes `folder`."""
    command: str = ""
    """The command that started the run, without secrets."""

    @cached_property
    def settings(self) -> dict[str, Any]:
        return masked(self.config)


class Logger(Protocol):
    """A client of one tracker."""

    def start(self) -> None:
        """Open or, on resume, continue the run at the tracker."""

    def log(self, iteration: int, time: float, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one iteration; `time` is in Unix seconds."""

    def samples(self, iteration: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send a table of sample trajectories."""

    def image(self, path: Path) -> None:
        """Send the picture at `path` under its file name; it replaces an older one of that name."""

    def finish(self, status: str) -> None:
        """End the run as `finished`, `interrupted` or `failed`."""

    def where(self) -> str:
        """Return the command or address that shows the run, without waiting for the tracker."""


def check_loggers(names: Sequence[str]) -> None:
    """Check, before anything is started, that these loggers can work.

    Raises:
        ValueError: a name is unknown; the message offers the nearest valid one.
        ImportError: the logger's package is not installed; the message has the command.
    """
    for name in names:
        if name not in LOGGERS:
            nearest = difflib.get_close_matches(str(name), LOGGERS, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"trainer.logger has {name!r}, which is not a logger; did you mean {nearest!r}? There are "
                f"{', '.join(LOGGERS)}."
            )
        package, command = LOGGERS[name]
        if importlib.util.find_spec(package) is None:
            raise ImportError(
                f"trainer.logger has {name!r}, but the package {package} is not installed; "
                f"run `{command}` or take {name!r} out of trainer.logger"
            )


class TensorBoardLogger:
    """Writes TensorBoard event files in `runs/NAME/tensorboard`."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._folder = run.folder / "tensorboard"
        self._writer: Any = None
        self._last = -1

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._run.resume:
            for old in self._folder.glob("events.out.tfevents.*"):
                old.unlink()

    def log(self, iteration: int, time: float, metrics: Mapping[str, float]) -> None:
        writer = self._open(iteration)
        for name, value in metrics.items():
            writer.add_scalar(name, value, global_step=iteration, walltime=time)
        writer.flush()

    def samples(self, iteration: int, rows: Sequence[Mapping[str, Any]]) -> None:
        text = "\n\n".join("\n".join(f"    {key}: {value}" for key, value in row.items()) for row in rows)
        self._open(None).add_text("samples", text, global_step=iteration)

    def image(self, path: Path) -> None:
        """Do nothing: TensorBoard draws its own curves, and the picture stays in the run's folder."""

    def finish(self, status: str) -> None:
        self._open(None).add_text("status", status)
        self._writer.close()

    def where(self) -> str:
        return f"tensorboard --logdir {shown(self._folder)}"

    def _open(self, iteration: int | None) -> Any:
        """Return the writer for an iteration, or for records without one.

        An iteration that is not after the last one opens a new writer, which hides all values from that iteration on.
        """
        from torch.utils.tensorboard import SummaryWriter

        again = iteration is not None and self._writer is not None and iteration <= self._last
        if again:
            self._writer.close()
        if self._writer is None or again:
            first = self._writer is None
            self._writer = SummaryWriter(str(self._folder), purge_step=iteration if again or self._run.resume else None)
            if first:
                settings = "\n".join(f"    {key}: {value}" for key, value in flattened(self._run.settings).items())
                self._writer.add_text("config", settings)
        if iteration is not None:
            self._last = iteration
        return self._writer


class WandbLogger:
    """Logs to Weights & Biases; `WANDB_*` variables (`WANDB_MODE`, `WANDB_BASE_URL`, ...) work as usual."""

    def __init__(self, run: TrackedRun) -> None:
        self._tracked = run
        self._id_file = run.folder / "wandb_run_id"
        self._run: Any = None

    def start(self) -> None:
        import wandb

        known = self._id_file.read_text().strip() if self._tracked.resume and self._id_file.exists() else None
        self._run = wandb.init(
            project=self._tracked.project,
            name=self._tracked.name,
            id=known,
            resume="allow" if known else None,
            dir=str(self._tracked.folder),
            config=self._tracked.settings,
            settings=wandb.Settings(console="off", silent=True),
        )
        write_atomically(self._id_file, f"{self._run.id}\n".encode())
        # wandb's own step cannot go back, but an iteration can if a run resumes.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")
        commit = git_commit()
        facts = {"versions": versions(), "git_commit": commit[0] if commit else None}
        self._run.config.update({"provenance": facts}, allow_val_change=True)

    def log(self, iteration: int, time: float, metrics: Mapping[str, float]) -> None:
        self._run.log({"iteration": iteration, **metrics})

    def samples(self, iteration: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        columns = list(rows[0])
        table = wandb.Table(columns=columns, data=[[row.get(column) for column in columns] for row in rows])
        self._run.log({"iteration": iteration, "samples": table})

    def image(self, path: Path) -> None:
        import wandb

        self._run.log({path.stem: wandb.Image(str(path))})

    def finish(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "finished" else 1)

    def where(self) -> str:
        return str(getattr(self._run, "url", None) or f"wandb sync {shown(self._tracked.folder / 'wandb')}/*run-*")


def shown(path: Path) -> str:
    """Return `path` for display: relative if it is below the current folder, else absolute."""
    path = path.absolute()
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
