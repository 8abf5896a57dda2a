"""An evaluation at the trackers of `trainer.logger`.

It is a run of its own in the experiment of the training run, and with MLflow's embedded store in the store of the
training run, so that both stand side by side. An evaluation that is continued later continues its tracker runs too.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from pipeline.config import Config, to_flat
from pipeline.track.loggers import check_loggers
from pipeline.track.sender import Sender
from pipeline.track.tracker import make_loggers

log = logging.getLogger(__name__)

FLUSH_S = 30.0


class Trackers:
    """All trackers of one evaluation. One that is slow or down costs a warning and at most `FLUSH_S` at the end.

    Args:
        config: the settings.
        run_dir: folder whose MLflow store is used without a server: that of the training run.
        out: the evaluation's folder, which keeps the ids of the tracker runs.
        name: of the evaluation.

    Raises:
        ValueError, ImportError: as `check_loggers`.
    """

    def __init__(self, config: Config, run_dir: Path, out: Path, name: str) -> None:
        trainer = config.trainer
        check_loggers(trainer.logger)
        self._loggers = make_loggers(trainer.logger, out, to_flat(config), trainer.project_name, name, True, run_dir)
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
            files: files that MLflow keeps with the run.

        Returns:
            Sentences on what could not be sent.
        """
        for name, sender in self._senders.items():
            logger = self._loggers[name]
            if metrics:
                sender.put("the metrics", partial(logger.log, iteration, time.time(), metrics))
            for file in files if name == "mlflow" else ():
                sender.put(f"the file {file.name}", partial(logger.image, file))
            sender.put("the end of the evaluation", partial(logger.finish, status), keep=True)
        deadline = time.monotonic() + FLUSH_S
        problems = [problem for sender in self._senders.values() if (problem := sender.close(deadline))]
        for problem in problems:
            log.warning("%s", problem)
        return problems

    def where(self) -> dict[str, str]:
        """How a person looks at each tracker."""
        return {name: logger.where() for name, logger in self._loggers.items()}
