"""Settings of a train worker."""

from dataclasses import dataclass
from typing import Any

from pipeline.config import Config
from pipeline.prompts.stage import Schedule


@dataclass(frozen=True)
class LoopSettings:
    """Arguments of every train worker."""

    config: Config
    schedule: Schedule
    store: Any
    run_dir: str
    start: str = ""
    """Name of this start of the run, which restarts of its workers share."""
    policy: str | None = None
    """Folder or URL of another run's checkpoint, with whose weights a new run begins; None begins with `model.path`."""
