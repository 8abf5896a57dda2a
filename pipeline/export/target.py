"""What `jobs.serve` is told to serve: a run, one of its checkpoints, a model folder, a hub name, a registered model."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.export.choice import choose, is_run
from pipeline.export.folder import export
from pipeline.export.settings import ModelSettings, load_settings
from pipeline.run_folder import CONFIG_FILE
from pipeline.track.mlflow_logger import QUIET

EXPORTS = "exports"
REGISTERED = "models:/"


@dataclass(frozen=True)
class Target:
    """A model that can be served."""

    path: str
    """Folder or hub name."""
    name: str
    """What it is called."""
    settings: ModelSettings | None
    """How its run validated it, if that is known."""
    config: Config | None = None
    """Of its run, if it comes from one."""
    notes: list[str] = field(default_factory=list)

    def engine(self, key: str, default: Any) -> Any:
        """A setting `rollout.KEY` of the run, or `default`."""
        return default if self.config is None else getattr(self.config.rollout, key)


def find(target: str, iteration: int | None = None, best: str | None = None, lowest: bool = False) -> Target:
    """The model that `target` names.

    A run's checkpoint is exported to `RUN/exports/iteration_N` in the type that the run's engines computed in. That is
    done every time: a checkpoint of the same number may have been made anew.

    Args:
        target: a run's folder, one of its checkpoints, a Hugging Face folder, a hub name, or `models:/NAME@ALIAS`.
        iteration, best, lowest: which checkpoint of a run, see `choose`.

    Raises:
        ValueError: nothing that can be served is there, or a checkpoint is asked of something that is no run.
        OSError: the export cannot be written.
    """
    path = Path(target).absolute()
    if is_run(path):
        checkpoint, notes = choose(path, iteration, best, lowest)
        config = checkpoint.config()
        inside = checkpoint.run_dir != checkpoint.path
        out = (checkpoint.run_dir if inside else checkpoint.path.parent) / EXPORTS / checkpoint.path.name
        export(checkpoint, out, config.rollout.dtype, replace=True)
        settings = ModelSettings.of(config, checkpoint.iteration)
        return Target(str(out), config.trainer.experiment_name, settings, config, notes)
    if iteration is not None or best is not None:
        raise ValueError(f"--iteration and --best choose a checkpoint of a run, but {target} is no run's folder")
    if target.startswith(REGISTERED):
        path = _download(target)
        return Target(str(path), target.removeprefix(REGISTERED).partition("@")[0], load_settings(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"{path} is neither a run's folder (it holds no {CONFIG_FILE}) nor a model's (it holds no config.json)"
            )
        return Target(str(path), path.name, load_settings(path))
    if target.startswith((".", "/", "~")) or target.count("/") > 1 or path.exists():
        raise ValueError(f"{target} is not a folder; give a run's folder, a model's folder or a hub name")
    return Target(target, target, None)


def _download(uri: str) -> Path:
    """The files of a registered model, fetched where they are not on this machine."""
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        raise ValueError(f"{uri} is a registered model; set MLFLOW_TRACKING_URI to the tracker that has it")
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    try:
        return Path(download_artifacts(artifact_uri=uri))
    except MlflowException as error:
        raise ValueError(f"{uri} cannot be fetched: {error.message}") from error
