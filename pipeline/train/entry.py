"""What the driver hands to Ray Train. Its controller reads this too, and has no use for what the loop imports."""

from dataclasses import dataclass
from typing import Any

from pipeline.config import Config
from pipeline.prompts.stage import Schedule
from pipeline.store.events import TrainingEnded


@dataclass(frozen=True)
class LoopSettings:
    """What the driver gives every train worker."""

    config: Config
    schedule: Schedule
    store: Any
    run_dir: str
    checkpoint: str | None = None
    """Folder or URL of the checkpoint that the run begins with; null begins anew."""


def train_loop(settings: dict[str, LoopSettings]) -> TrainingEnded:
    """Entry point of a Ray Train worker; how training ended."""
    from pipeline.train.loop import Loop

    return Loop(settings["settings"]).run()
