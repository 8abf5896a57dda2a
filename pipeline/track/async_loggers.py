"""The loggers of one run. Each logger's methods are called in order by its own background thread.

A slow or failing tracker causes warnings and retries, and never stops the run.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.track.loggers import Logger, TensorBoardLogger, TrackedRun, WandbLogger, check_loggers
from pipeline.track.mlflow_logger import MlflowLogger
from pipeline.track.retry_queue import RetryQueue

LOGGERS: dict[str, Callable[[TrackedRun], Logger]] = {
    "mlflow": MlflowLogger,
    "wandb": WandbLogger,
    "tensorboard": TensorBoardLogger,
}


TRACE_TRIES = 8
"""Maximum number of attempts to send a trace, which matters less than metrics. With the pauses between them they take
minutes."""


class AsyncLoggers:
    """The loggers of a run.

    Args:
        names: names of the loggers; `console` is skipped.
        run: the run.

    Raises:
        ValueError, ImportError: see `check_loggers`.
    """

    def __init__(self, names: Sequence[str], run: TrackedRun) -> None:
        check_loggers(names)
        self._loggers = {name: (make(run), RetryQueue(name)) for name, make in LOGGERS.items() if name in names}

    def start(self) -> None:
        """Begin, in the background, to connect to the trackers."""
        for logger, queue in self._loggers.values():
            queue.put("the start of the run", logger.start, keep=True)
            queue.start()

    def log(self, iteration: int, moment: float, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one iteration; `moment` is their time in Unix seconds."""
        for logger, queue in self._loggers.values():
            queue.put(f"the metrics of iteration {iteration}", logger.log, iteration, moment, metrics)

    def samples(self, iteration: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send a table of sample trajectories (`prompt`, `response`, `score`, ...)."""
        if not rows:
            return
        for logger, queue in self._loggers.values():
            queue.put(f"the samples of iteration {iteration}", logger.samples, iteration, rows)

    def traces(self, split: str, iteration: int, moment: float, count: int) -> None:
        """Send recorded rows of an iteration to MLflow as traces, if MLflow is in use.

        Args:
            split: `train` or `val`.
            iteration: number of the iteration; for `val`, the policy version.
            moment: time in Unix seconds.
            count: maximum number of rows.
        """
        what = f"the traces of {'validation' if split == 'val' else 'iteration'} {iteration}"
        for logger, queue in self._loggers.values():
            if count and isinstance(logger, MlflowLogger):
                queue.put(what, logger.traces, split, iteration, moment, count, tries=TRACE_TRIES)

    def image(self, path: Path) -> None:
        """Send a picture. It replaces an older one of the same file name that has not been sent yet."""
        for logger, queue in self._loggers.values():
            queue.put(f"the picture {path.name}", logger.image, path, latest=True)

    def file(self, path: Path) -> None:
        """Store a file with the MLflow run, if MLflow is in use."""
        if "mlflow" in self._loggers:
            logger, queue = self._loggers["mlflow"]
            queue.put(f"the file {path.name}", logger.image, path)

    def finish(self, status: str, timeout_s: float) -> list[str]:
        """End the runs at the trackers.

        Args:
            status: `finished`, `interrupted` or `failed`.
            timeout_s: maximum seconds to wait for records that have not been sent yet.

        Returns:
            A sentence for each tracker that lacks records.
        """
        for logger, queue in self._loggers.values():
            queue.put("the end of the run", logger.finish, status, keep=True)
        deadline = time.monotonic() + timeout_s
        return [problem for _, queue in self._loggers.values() if (problem := queue.close(deadline))]

    @property
    def names(self) -> list[str]:
        """Names of the trackers."""
        return list(self._loggers)

    def where(self) -> dict[str, str]:
        """Return the address or command that shows the run, by name of the tracker; for MLflow also the page with the
        curves."""
        places = {name: logger.where() for name, (logger, _) in self._loggers.items()}
        for name, (logger, _) in self._loggers.items():
            if isinstance(logger, MlflowLogger) and (charts := logger.charts()):
                places[f"{name} curves"] = charts
        return places
