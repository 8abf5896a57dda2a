"""An evaluation at the trackers of `trainer.logger`.

It is a run of its own, in the experiment that the training run belongs to: with MLflow's embedded store, in the file of
the training run, so that both stand side by side. An evaluation that goes on later goes on there, too.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config import Config, to_flat
from pipeline.track.loggers import Logger, TensorBoardLogger, WandbLogger, check_loggers
from pipeline.track.mlflow_logger import MlflowLogger
from pipeline.track.sender import Sender

log = logging.getLogger(__name__)

FLUSH_S = 30.0


class EvaluationMlflow(MlflowLogger):
    """One MLflow run.

    Args:
        home: folder whose `mlflow.db` is used where no server is named.
        out: the evaluation's folder, which keeps the run's id.
        config: settings that become parameters.
        project: the experiment.
        name: of the run.
    """

    def __init__(self, home: Path, out: Path, config: Mapping[str, Any], project: str, name: str) -> None:
        super().__init__(home, config, project, name, resume=True)
        self._id_file = out / "mlflow_run_id"

    def attach(self, file: Path) -> None:
        """Keep a copy of `file` with the run."""
        self._client().log_artifact(self._run_id, str(file))


class Trackers:
    """All trackers of one evaluation; what is slow or down costs a warning and at most `FLUSH_S` at the end.

    Args:
        config: the settings.
        home, out: as of `EvaluationMlflow`.
        name: of the evaluation.

    Raises:
        ValueError, ImportError: as `check_loggers`.
    """

    def __init__(self, config: Config, home: Path, out: Path, name: str) -> None:
        names, settings, project = config.trainer.logger, to_flat(config), config.trainer.project_name
        check_loggers(names)
        self._loggers: dict[str, Logger] = {}
        if "mlflow" in names:
            self._loggers["mlflow"] = EvaluationMlflow(home, out, settings, project, name)
        if "wandb" in names:
            self._loggers["wandb"] = WandbLogger(out, settings, project, name, resume=True)
        if "tensorboard" in names:
            self._loggers["tensorboard"] = TensorBoardLogger(out, settings, resume=True)
        self._senders = {name: Sender(name) for name in self._loggers}

    def start(self) -> None:
        """Begin to connect, in the background."""
        for name, sender in self._senders.items():
            sender.put("the start of the evaluation", self._loggers[name].start, keep=True)
            sender.start()

    def finish(
        self, status: str, iteration: int, metrics: Mapping[str, float], files: Sequence[Path] = ()
    ) -> list[str]:
        """Send the result and end.

        Args:
            status: `finished`, `interrupted` or `failed`.
            iteration: step of the metrics.
            metrics: by name; may be empty.
            files: what MLflow keeps with the run.

        Returns:
            Sentences on what could not be sent.
        """
        for name, sender in self._senders.items():
            logger = self._loggers[name]
            if metrics:
                sender.put("the metrics", partial(logger.log, iteration, time.time(), metrics))
            if isinstance(logger, EvaluationMlflow):
                for file in files:
                    sender.put(f"the file {file.name}", partial(logger.attach, file))
            sender.put("the end of the evaluation", partial(logger.finish, status), keep=True)
        deadline = time.monotonic() + FLUSH_S
        lacking = [problem for sender in self._senders.values() if (problem := sender.close(deadline))]
        for problem in lacking:
            log.warning("%s", problem)
        return lacking

    def where(self) -> dict[str, str]:
        """How a person looks at each tracker."""
        return {name: logger.where() for name, logger in self._loggers.items()}
