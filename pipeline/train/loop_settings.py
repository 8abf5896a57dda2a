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
    """Numbers of iterations and chunks, and the iterations that are validated."""
    store: Any
    """Handle of the policy store's actor."""
    run_dir: str
    """Folder or URL of the run."""
    start: str = ""
    """Name of this start of the run; it stays the same if train workers are restarted."""
    policy: str | None = None
    """Folder or URL of another run's checkpoint whose weights a new run begins with; None begins with `model.path`."""
