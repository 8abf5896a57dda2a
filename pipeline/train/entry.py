"""Entry point of Ray Train. Its controller imports this module too, so the loop's imports wait until it runs."""

from dataclasses import dataclass
from typing import Any

from pipeline.config import Config
from pipeline.prompts.stage import Schedule
from pipeline.store.events import TrainingEnded


@dataclass(frozen=True)
class LoopSettings:
    """Arguments of every train worker."""

    config: Config
    schedule: Schedule
    store: Any
    run_dir: str
    start: str = ""
    """Name of this start of the run, which restarts of its workers share."""
    checkpoint: str | None = None
    """Folder or URL of the checkpoint that the run begins with; None begins with `model.path`."""


def train_loop(settings: dict[str, LoopSettings]) -> TrainingEnded:
    """Run the train loop in a Ray Train worker; returns how training ended."""
    from pipeline.train.loop import Loop

    return Loop(settings["settings"]).run()
