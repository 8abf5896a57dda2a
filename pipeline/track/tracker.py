"""Writes the driver's records of a run: `metrics.jsonl`, console, trackers and the learning curve.

`metrics.jsonl` and the console are written at once, everything else (MLflow, wandb, TensorBoard, the plot) in the
background.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

from rich.console import Console

from pipeline.track.async_loggers import AsyncLoggers
from pipeline.track.console import RunConsole
from pipeline.track.history import OWN_KEYS, History
from pipeline.track.loggers import TrackedRun, shown
from pipeline.track.plot import learning_curve
from pipeline.track.retry_queue import RetryQueue
from pipeline.track.samples import for_people

log = logging.getLogger(__name__)

STATUSES = ("finished", "interrupted", "failed")
PLOT_INTERVAL_S = 60.0
"""Minimum number of seconds from one drawing of the learning curve to the next."""


class Tracker:
    """Records the metrics of one run, from `start` to `finish`. Methods may be called from several threads.

    Args:
        run: the run; with `resume`, its metrics are continued, too.
        total_iterations: total number of iterations; None if unknown.
        loggers: any of `console`, `mlflow`, `wandb`, `tensorboard`.
        flush_timeout_s: maximum seconds that `finish` waits for slow trackers.
        unit: short word for one iteration on the console.

    Raises:
        ValueError, ImportError: see `check_loggers`.
    """

    def __init__(
        self,
        run: TrackedRun,
        total_iterations: int | None,
        loggers: Sequence[str],
        flush_timeout_s: float = 30.0,
        unit: str = "it",
    ) -> None:
        self._run, self._flush_timeout_s = run, flush_timeout_s
        self._loggers = AsyncLoggers(loggers, run)
        self._plots = RetryQueue("the learning-curve plot")
        self._plotted_at = -PLOT_INTERVAL_S
        self._lock = threading.Lock()
        self._history: History | None = None
        self._finished = False
        if "console" in loggers:
            self._console = RunConsole(run.name, total_iterations, log=run.folder / "console.log", unit=unit)
        else:
            self._console = RunConsole(run.name, total_iterations, Console(quiet=True, force_terminal=False), unit=unit)

    @property
    def metrics_path(self) -> Path:
        """Path of the run's `metrics.jsonl`."""
        return self._run.folder / "metrics.jsonl"

    @property
    def plot_path(self) -> Path:
        """Path of the run's `learning_curve.png`."""
        return self._run.folder / "learning_curve.png"

    def start(self) -> None:
        """Open `metrics.jsonl` and start to connect to the trackers in the background.

        Raises:
            ValueError: the `metrics.jsonl` to be continued is damaged before its last line.
            OSError: the run's folder cannot be written.
        """
        self._history = History(self.metrics_path, resume=self._run.resume)
        self._loggers.start()
        self._plots.start()
        self._console.start()

    def log(self, iteration: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Record the metrics of one iteration. Earlier records of this and later iterations are replaced.

        Raises:
            ValueError: a metric is not a number.
            OSError: `metrics.jsonl` cannot be written (disk full); earlier lines stay whole.
        """
        with self._lock:
            record = self._opened().append(iteration, metrics)
            numbers = {key: record[key] for key in metrics}
            self._loggers.log(iteration, record["time"], numbers)
            if time.monotonic() - self._plotted_at >= PLOT_INTERVAL_S:
                self._plotted_at = time.monotonic()
                self._plots.put("a drawing", self._plot, latest=True)
        self._console.update(iteration, numbers)

    def keep(self, iteration: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Record an iteration only in `metrics.jsonl`, before all metrics are known; `log` replaces the record later.

        Raises:
            ValueError, OSError: see `log`.
        """
        with self._lock:
            self._opened().append(iteration, metrics)

    def recorded(self, iteration: int) -> dict[str, float] | None:
        """Return the metrics of `iteration` in `metrics.jsonl`, also from before the run was resumed; None if there are
        none."""
        with self._lock:
            for record in reversed(self._opened().records):
                if record["iteration"] == iteration:
                    return {name: value for name, value in record.items() if name not in OWN_KEYS and value is not None}
        return None

    def status(self, text: str) -> None:
        """Show what the run is doing or waiting for."""
        self._console.status(text)

    def notice(self, text: str) -> None:
        """Show a message, and append it as a line to `console.log`."""
        self._console.notice(text)

    def samples(self, iteration: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send a table of sample trajectories (`prompt`, `response`, `score`, ...) to the trackers."""
        self._loggers.samples(iteration, for_people(rows))

    def traces(self, split: str, iteration: int, count: int) -> None:
        """Send at most `count` recorded rows of an iteration (for `val`, of a policy version) to MLflow as traces."""
        self._loggers.traces(split, iteration, time.time(), count)

    def finish(self, status: str, summary: Mapping[str, str] | None = None) -> list[str]:
        """Draw the last plot, flush the trackers within `flush_timeout_s` and print the table. Only the first call has
        an effect.

        Args:
            status: `finished`, `interrupted` or `failed`.
            summary: further lines of the table, such as `{"model": path, "to continue": command}`.

        Returns:
            Sentences on records that could not be sent.

        Raises:
            ValueError: `status` is unknown.
        """
        if status not in STATUSES:
            raise ValueError(f"a run ends as one of {', '.join(STATUSES)}, not as {status!r}")
        with self._lock:
            if self._finished or self._history is None:
                return []
            self._finished = True
            records = list(self._history.records)
        lagging = ", ".join(["the plot", *self._loggers.names])
        self.status(f"sending the last records to {lagging} (at most {self._flush_timeout_s:.0f} s)")
        if records:
            self._plots.put("a drawing", self._plot, latest=True)
        deadline = time.monotonic() + self._flush_timeout_s
        problems = [self._plots.close(deadline - self._flush_timeout_s / 2)]
        problems += self._loggers.finish(status, deadline - time.monotonic())
        lacking = [problem for problem in problems if problem]
        self._console.stop()
        for problem in lacking:
            log.warning("%s; all metrics are in %s", problem, self.metrics_path)
        self._console.summary(status, records, self._places(summary or {}), lacking)
        return lacking

    def _places(self, summary: Mapping[str, str]) -> dict[str, str]:
        places = {"run folder": shown(self._run.folder), "metrics": shown(self.metrics_path)}
        for label, path in (("plot", self.plot_path), ("trajectories", self._run.folder / "trajectories")):
            if path.exists():
                places[label] = shown(path)
        return places | self._loggers.where() | dict(summary)

    def _plot(self) -> None:
        if learning_curve(self.metrics_path, self.plot_path, self._run.name):
            self._loggers.image(self.plot_path)

    def _opened(self) -> History:
        if self._history is None:
            raise RuntimeError("metrics were logged before the tracker's start()")
        return self._history
