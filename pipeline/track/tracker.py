"""The run's record keeper in the driver: `metrics.jsonl`, console, trackers and the learning curve.

`metrics.jsonl` and the console are written at once. Everything else (MLflow, wandb, TensorBoard, the plot) goes
through one `Sender` each, so that what is slow or down costs a warning and a retry and never the run.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat

from pipeline.track.console import RunConsole
from pipeline.track.history import OWN_KEYS, History
from pipeline.track.loggers import Logger, TensorBoardLogger, WandbLogger, check_loggers, shown
from pipeline.track.mlflow_logger import MlflowLogger
from pipeline.track.plot import learning_curve
from pipeline.track.sender import Sender

log = logging.getLogger(__name__)

STATUSES = ("finished", "interrupted", "failed")


def make_loggers(
    names: Sequence[str],
    folder: Path,
    config: Mapping[str, Any],
    project: str,
    name: str,
    resume: bool,
    store_of: Path | None = None,
) -> dict[str, Logger]:
    """The trackers of a run, by name.

    Args:
        names: any of `mlflow`, `wandb`, `tensorboard`; others are left out.
        folder: the run's folder, which keeps the ids of the tracker runs.
        config: the resolved configuration as plain nested mappings.
        project: MLflow experiment, wandb project.
        name: the run's name.
        resume: continue the tracker runs that the folder has.
        store_of: folder of the run whose MLflow store is used without a server; None is `folder`.
    """
    loggers: dict[str, Logger] = {}
    if "mlflow" in names:
        store = store_of or folder
        loggers["mlflow"] = MlflowLogger(store, config, project, name, resume=resume, id_dir=folder)
    if "wandb" in names:
        loggers["wandb"] = WandbLogger(folder, config, project, name, resume=resume)
    if "tensorboard" in names:
        loggers["tensorboard"] = TensorBoardLogger(folder, config, resume=resume)
    return loggers


class Tracker:
    """Metrics of one run, from `start` to `finish`; methods may be called from several threads."""

    def __init__(
        self,
        run_dir: Path | str,
        config: Mapping[str, Any],
        total_iterations: int | None,
        loggers: Sequence[str],
        project: str,
        name: str,
        resume: bool = False,
        *,
        flush_timeout_s: float = 30.0,
        plot_interval_s: float = 60.0,
    ) -> None:
        """
        Args:
            run_dir: the run's folder on a local or shared disk.
            config: the resolved configuration as plain nested mappings.
            total_iterations: iterations in all, None when unknown.
            loggers: any of `console`, `mlflow`, `wandb`, `tensorboard`.
            project: MLflow experiment, wandb project.
            name: the run's name.
            resume: continue the metrics and tracker runs that the folder has; else they begin anew.
            flush_timeout_s: longest wait of `finish` for trackers that lag.
            plot_interval_s: seconds between two drawings of the learning curve.

        Raises:
            ValueError, ImportError: as `check_loggers`.
        """
        check_loggers(loggers)
        self._run_dir = Path(run_dir).absolute()
        self._name = name
        self._resume = resume
        self._flush_timeout_s = flush_timeout_s
        self._plot_interval_s = plot_interval_s
        self._plotted_at = -plot_interval_s
        self._lock = threading.Lock()
        self._history: History | None = None
        self._finished = False
        self._console = (
            RunConsole(name, total_iterations, log=self._run_dir / "console.log") if "console" in loggers else None
        )
        self._loggers = make_loggers(loggers, self._run_dir, config, project, name, resume)
        self._senders = {logger: Sender(logger) for logger in self._loggers}
        self._plotter = Sender("the learning-curve plot")

    @property
    def metrics_path(self) -> Path:
        """The run's `metrics.jsonl`."""
        return self._run_dir / "metrics.jsonl"

    @property
    def plot_path(self) -> Path:
        """The run's `learning_curve.png`."""
        return self._run_dir / "learning_curve.png"

    def start(self) -> None:
        """Opens `metrics.jsonl` and begins to connect to the trackers in the background.

        Raises:
            ValueError: the `metrics.jsonl` to be continued is damaged before its last line.
            OSError: the run's folder cannot be written.
        """
        self._history = History(self.metrics_path, resume=self._resume)
        for name, sender in self._senders.items():
            sender.put("the start of the run", self._loggers[name].start, keep=True)
            sender.start()
        self._plotter.start()
        if self._console is not None:
            self._console.start()

    def log(self, iteration: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Records one iteration; one that comes again replaces itself and all later ones.

        Raises:
            ValueError: a metric is not a number.
            OSError: `metrics.jsonl` cannot be written (disk full); earlier lines stay whole.
        """
        with self._lock:
            record = self._opened().append(iteration, metrics)
            numbers = {key: record[key] for key in metrics}
            for name, sender in self._senders.items():
                send = partial(self._loggers[name].log, iteration, record["time"], numbers)
                sender.put(f"the metrics of iteration {iteration}", send)
            if time.monotonic() - self._plotted_at >= self._plot_interval_s:
                self._plotted_at = time.monotonic()
                self._plotter.put("a drawing", self._plot, latest=True)
        if self._console is not None:
            self._console.update(iteration, numbers)

    def keep(self, iteration: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Records one iteration in `metrics.jsonl` alone, before it is known in full; `log` replaces it.

        Raises:
            ValueError, OSError: as `log`.
        """
        with self._lock:
            self._opened().append(iteration, metrics)

    def recorded(self, iteration: int) -> dict[str, float] | None:
        """Metrics of `iteration` in `metrics.jsonl`, those of resumed runs' past among them; None without."""
        with self._lock:
            for record in reversed(self._opened().records):
                if record["iteration"] == iteration:
                    return {name: value for name, value in record.items() if name not in OWN_KEYS and value is not None}
        return None

    def status(self, text: str) -> None:
        """Shows what the run does or waits for."""
        if self._console is not None:
            self._console.status(text)

    def notice(self, text: str) -> None:
        """Shows what has to be seen in a log, too."""
        if self._console is not None:
            self._console.notice(text)

    def samples(self, iteration: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Sends a table of sample trajectories (`prompt`, `response`, `score`, ...) to the trackers."""
        if not rows:
            return
        kept = [dict(row) for row in rows]
        for name, sender in self._senders.items():
            sender.put(f"the samples of iteration {iteration}", partial(self._loggers[name].samples, iteration, kept))

    def finish(self, status: str, summary: Mapping[str, str] | None = None) -> list[str]:
        """Draws the last plot, flushes the trackers within the deadline and prints the table. Works once.

        Args:
            status: `finished`, `interrupted` or `failed`.
            summary: further lines of the table, such as `{"model": path, "to continue": command}`.

        Returns:
            Sentences on what could not be sent.

        Raises:
            ValueError: an unknown `status`.
        """
        if status not in STATUSES:
            raise ValueError(f"a run ends as one of {', '.join(STATUSES)}, not as {status!r}")
        with self._lock:
            if self._finished or self._history is None:
                return []
            self._finished = True
            records = list(self._history.records)
        lagging = ", ".join(["the plot", *self._senders])
        self.status(f"sending the last records to {lagging} (at most {self._flush_timeout_s:.0f} s)")
        deadline = time.monotonic() + self._flush_timeout_s
        if records:
            self._plotter.put("a drawing", self._plot, latest=True)
        problems = [self._plotter.close(deadline - self._flush_timeout_s / 2)]
        for name, sender in self._senders.items():
            sender.put("the end of the run", partial(self._loggers[name].finish, status), keep=True)
        problems += [sender.close(deadline) for sender in self._senders.values()]
        if self._console is not None:
            self._console.stop()
        lacking = [problem for problem in problems if problem]
        for problem in lacking:
            log.warning("%s; all metrics are in %s", problem, self.metrics_path)
        if self._console is not None:
            self._console.summary(status, records, self._places(summary or {}), lacking)
        return lacking

    def _places(self, summary: Mapping[str, str]) -> dict[str, str]:
        places = {"run folder": shown(self._run_dir), "metrics": shown(self.metrics_path)}
        for label, path in (("plot", self.plot_path), ("trajectories", self._run_dir / "trajectories")):
            if path.exists():
                places[label] = shown(path)
        places |= {name: logger.where() for name, logger in self._loggers.items()}
        return places | {label: str(text) for label, text in summary.items()}

    def _plot(self) -> None:
        if learning_curve(self.metrics_path, self.plot_path, self._name):
            for name, sender in self._senders.items():
                sender.put("the learning curve", partial(self._loggers[name].image, self.plot_path), latest=True)

    def _opened(self) -> History:
        if self._history is None:
            raise RuntimeError("metrics were logged before the tracker's start()")
        return self._history
