"""An exported model as a version of a registered model in MLflow, with an alias and its lineage.

1. The tracker is the run's: the server that `MLFLOW_TRACKING_URI` names, else the store in the run's folder.
2. A server gets the files, as artifacts of the run, since others have to reach them; for a store on this machine the
   version names the folder where it lies.
3. Lineage is the MLflow run that made the weights, which the checkpoint names, and the prompt files as its data set
   inputs.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.export.choice import Checkpoint
from pipeline.track.history import validation_scores
from pipeline.track.mlflow_logger import QUIET, mlflow_name

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

TAIL = 1 << 16
"""Bytes at the end of a file that go into its digest; a parquet file has its statistics there."""


def connect(checkpoint: Checkpoint) -> "tuple[MlflowClient, str]":
    """The client of the tracker of the checkpoint's run, and the id of its MLflow run.

    Raises:
        ValueError: the run was not tracked by MLflow, or its tracker is not known or does not have it.
    """
    run_id, store = checkpoint.mlflow_run_id, checkpoint.run_dir / "mlflow.db"
    if run_id is None:
        raise ValueError(
            f"the run of {checkpoint.path} was not tracked by MLflow, so no registered model can link to it"
        )
    server = os.environ.get("MLFLOW_TRACKING_URI")
    if not server and not store.is_file():
        raise ValueError(f"{store} is not there; set MLFLOW_TRACKING_URI to the server that tracked the run")
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    for noisy in ("mlflow.store.db.utils", "mlflow.store.model_registry.abstract_store", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    uri = server or f"sqlite:///{store.absolute()}"
    client = MlflowClient(uri)
    try:
        client.get_run(run_id)
    except MlflowException as error:
        raise ValueError(
            f"the tracker {uri} has no run {run_id}, which made {checkpoint.path}: {error.message}"
        ) from error
    return client, run_id


def register(checkpoint: Checkpoint, folder: Path, name: str, alias: str | None = None) -> tuple[str, str]:
    """Make the exported model in `folder` a new version of the registered model `name`.

    Args:
        checkpoint: what was exported.
        folder: the exported model.
        name: the registered model; it is made if it is not there.
        alias: given to the new version, and taken from an older one.

    Returns:
        the version, and where it is registered.

    Raises:
        ValueError: see `connect`; or MLflow refuses the name or the alias.
    """
    client, run_id = connect(checkpoint)
    from mlflow.exceptions import MlflowException

    config = checkpoint.config()
    try:
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        log_datasets(client, run_id, config)
        made = client.create_model_version(
            name,
            _source(client, run_id, folder, checkpoint.iteration),
            run_id=run_id,
            tags=_tags(checkpoint, config),
            description=f"{config.trainer.experiment_name}, iteration {checkpoint.iteration}",
        )
        if alias:
            client.set_registered_model_alias(name, alias, made.version)
    except MlflowException as error:
        raise ValueError(f"MLflow did not register {name!r}: {error.message}") from error
    return str(made.version), str(client.tracking_uri)


def log_datasets(client: "MlflowClient", run_id: str, config: Config) -> None:
    """Make the prompt files of a run its data set inputs; those that it has already are not doubled."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for context, files in (("training", config.data.train_files), ("validation", config.data.val_files)):
        for address in [files] if isinstance(files, str) else files or []:
            scheme, _, rest = str(address).partition("://")
            source = {"uri": str(address) if rest else Path(address).absolute().as_uri()}
            dataset = Dataset(
                name=Path(rest or scheme).name or str(address),
                digest=_digest(str(address)),
                source_type=scheme if rest else "local",
                source=json.dumps(source),
            )
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", context)]))
    if inputs:
        client.log_inputs(run_id, inputs)


def _source(client: "MlflowClient", run_id: str, folder: Path, iteration: int) -> str:
    """Where the files of the version are."""
    if not str(client.tracking_uri).startswith(("http://", "https://", "databricks")):
        return folder.absolute().as_uri()
    place = f"export/iteration_{iteration:06d}"
    client.log_artifacts(run_id, str(folder), place)
    return f"{client.get_run(run_id).info.artifact_uri}/{place}"


def _tags(checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
    record = checkpoint.metrics().get(checkpoint.iteration, {})
    scores = {name: value for name, value in record.items() if name.startswith("val-core/") and value is not None}
    tags = {"iteration": str(checkpoint.iteration), "run": config.trainer.experiment_name}
    tags |= {mlflow_name(name): f"{value:.6g}" for name, value in scores.items()}
    return tags | {f"validation.{source}": f"{value:.6g}" for source, value in validation_scores(record).items()}


def _digest(address: str) -> str:
    """16 hexadecimal digits of an address and of what can be seen of the files there: sizes and ends."""
    seen = hashlib.blake2b(address.encode(), digest_size=8)
    for file in _files(address):
        with open(file, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL))
            seen.update(f"{file.name}:{size}:".encode() + stream.read())
    return seen.hexdigest()


def _files(address: str) -> Iterator[Path]:
    path = Path(address)
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from sorted(file for file in path.rglob("*") if file.is_file())
