"""Tries, before a run begins, whether the folders and files that it will write can be written."""

import os
import tempfile
from pathlib import Path

from pipeline.config import ConfigError
from pipeline.storage.checkpoints import FOLDER

FOLDERS = (FOLDER, "trajectories", "validation", "old_log_probs", "quarantine", "tensorboard", "wandb", "model")
"""Names of folders that a run writes in its folder."""
FILES = ("metrics.jsonl", "console.log", "mlflow_run_id", "best.json", "learning_curve.png")
"""Names of files that a run writes in its folder."""


def try_targets(run_dir: Path, store: Path | None) -> None:
    """Write and remove a small file in each existing folder that a run writes, and open each existing file.

    Args:
        run_dir: the run's folder.
        store: the SQLite file of the run's tracker; None if there is none. The tracker writes further files next to it.

    Raises:
        ConfigError: a folder or file cannot be written.
    """
    places = [run_dir, *(run_dir / name for name in FOLDERS), *([store.parent] if store else [])]
    remedy = "free space, allow writing, or choose another trainer.default_local_dir or trainer.experiment_name"
    for folder in places:
        try:
            if os.path.lexists(folder):
                with tempfile.TemporaryFile(dir=folder) as file:
                    file.write(b"tried")
        except OSError as error:
            raise ConfigError(f"the run cannot write into {folder}: {error.strerror or error}; {remedy}") from error
    for path in (*(run_dir / name for name in FILES), *([store] if store else [])):
        try:
            if os.path.lexists(path):
                with path.open("ab"):
                    pass
        except OSError as error:
            raise ConfigError(f"the run cannot write {path}: {error.strerror or error}; {remedy}") from error
