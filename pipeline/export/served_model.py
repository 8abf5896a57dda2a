"""Finds the model that `jobs.serve` serves: from a run, in a folder, on the Hub, or registered in MLflow."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.config.model import ModelConfig
from pipeline.config.paths import local_path, model_folder
from pipeline.export.choose import choose, is_run
from pipeline.models.settings import ModelSettings, load_settings
from pipeline.models.tokenizer import load_tokenizer
from pipeline.models.tokenizer_fit import check_vocabulary, vocabulary
from pipeline.models.weight_files import model_shapes, note
from pipeline.track.mlflow_logger import QUIET

EXPORTS = "exports"
REGISTERED = "models:/"


@dataclass(frozen=True)
class ServedModel:
    """A model that can be served."""

    path: str
    """Folder of the model, or its name on the Hub."""
    name: str
    """Name of the model for clients."""
    settings: ModelSettings | None
    """Settings of the run's validation, if they are known."""
    config: Config | None = None
    """Settings of the run, if the model comes from one."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user, each a sentence."""
    calls: dict[str, Any] = field(default_factory=dict)
    """Arguments with which vLLM parses tool calls (`tools.py`)."""

    def engine(self, key: str, default: Any) -> Any:
        """Return the run's setting `rollout.KEY`, or `default` without a run."""
        return default if self.config is None else getattr(self.config.rollout, key)


def find(target: str, iteration: int | None = None, best: str | None = None, lowest: bool = False) -> ServedModel:
    """Find the model that `target` names.

    A run's checkpoint is exported to `RUN/exports/iteration_N` in the dtype of the run's engines. The export is
    repeated each time, since a repeated run has other weights under the same number.

    Args:
        target: a run's folder, one of its checkpoints, a Hugging Face folder, a Hub name, or `models:/NAME@ALIAS`.
        iteration, best, lowest: the choice of a checkpoint of a run, see `choose`.

    Raises:
        ValueError: `target` is a folder that does not exist or holds no model, or a checkpoint is requested of
            something that is not a run.
        OSError: the export cannot be written.
    """
    path = local_path(target).absolute()
    if is_run(path):
        checkpoint, notes = choose(path, iteration, best, lowest)
        # Torch and transformers take seconds to import, and a wrong path is refused without them.
        from pipeline.export.export import export

        config = checkpoint.config()
        inside = checkpoint.run_dir != checkpoint.path
        out = (checkpoint.run_dir if inside else checkpoint.path.parent) / EXPORTS / checkpoint.path.name
        export(checkpoint, out, config.rollout.dtype, replace=True)
        settings = ModelSettings.of(config, checkpoint.iteration)
        return ServedModel(str(out), config.trainer.experiment_name, settings, config, notes)
    if iteration is not None or best is not None:
        raise ValueError(
            f"--iteration and --best choose a checkpoint of a run, but {target} is not the folder of a run"
        )
    if target.startswith(REGISTERED):
        folder: Path | None = _download(target)
        name = target.removeprefix(REGISTERED).partition("@")[0]
    else:
        folder = model_folder(target, "RUN_OR_MODEL")
        name = folder.name if folder else target
    if folder is None:
        return ServedModel(target, target, None)
    return ServedModel(str(folder), name, load_settings(folder))


def notes_on_files(model: ServedModel) -> list[str]:
    """Return notes on files of weights in the model's folder that are not read.

    Raises:
        ValueError: files are damaged or incomplete, or the tokenizer has tokens that the model does not know.
    """
    folder = Path(model.path)
    if not folder.is_dir():
        return []
    model_shapes(folder)
    trusted = bool(model.config and model.config.model.trust_remote_code)
    served = ModelConfig(path=model.path, trust_remote_code=trusted)
    tokenizer = load_tokenizer(served, needs_chat_template=False, key="RUN_OR_MODEL")
    beyond = check_vocabulary(tokenizer, model.path, vocabulary(served), model.path)
    return [text for text in (note(folder, model.path), beyond) if text]


def _download(uri: str) -> Path:
    """Download the files of a registered model; returns their local folder."""
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
