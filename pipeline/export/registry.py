"""The registration of an exported model in MLflow: a version of a registered model, its alias, and its lineage.

1. The tracker is the run's: the server that `MLFLOW_TRACKING_URI` names, else the database next to the folders of the
   runs.
2. On a server, the files become artifacts of the run, since other machines have to reach them. In a database on this
   machine the version names the exported folder.
3. The version names the MLflow run that trained the weights; its id is in the checkpoint. That run has the prompt
   files as its data set inputs.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.export.choose import Checkpoint
from pipeline.track.mlflow_logger import QUIET, local_store, mlflow_name

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


def connect(checkpoint: Checkpoint) -> "tuple[MlflowClient, str]":
    """Connect to the tracker that has the checkpoint's run. Returns (client, id of the MLflow run).

    Raises:
        ValueError: MLflow did not track the run, or its tracker is not known or does not have the run.
    """
    run_id = checkpoint.mlflow_run_id
    if run_id is None:
        raise ValueError(f"MLflow did not track the run of {checkpoint.path}, so its model cannot be registered")
    store = local_store(checkpoint.run_dir)
    server = os.environ.get("MLFLOW_TRACKING_URI")
    if not server and not store.is_file():
        raise ValueError(f"{store} is not there; set MLFLOW_TRACKING_URI to the server that tracked the run")
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    for name in ("mlflow.store.db.utils", "mlflow.store.model_registry.abstract_store", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    client = MlflowClient(server or f"sqlite:///{store.absolute()}")
    try:
        client.get_run(run_id)
    except MlflowException as error:
        raise ValueError(
            f"{client.tracking_uri} has no run {run_id}, which trained {checkpoint.path}: {error.message}"
        ) from error
    return client, run_id


def register(checkpoint: Checkpoint, folder: Path, name: str, alias: str | None = None) -> tuple[str, str]:
    """Register the exported model in `folder` as a new version of the registered model `name`.

    The registered model is created if it does not exist, and `alias` is moved to the new version.

    Returns:
        The version, and the address of the tracker.

    Raises:
        ValueError: `connect` raised it, or MLflow refuses the name or the alias.
    """
    client, run_id = connect(checkpoint)
    from mlflow.exceptions import MlflowException

    config = checkpoint.config()
    tags = {"iteration": str(checkpoint.iteration), "run": config.trainer.experiment_name}
    for metric, value in checkpoint.metrics().get(checkpoint.iteration, {}).items():
        if metric.startswith("val-core/") and value is not None:
            tags[mlflow_name(metric)] = f"{value:.6g}"
    try:
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        version = client.create_model_version(
            name,
            _source(client, run_id, folder, checkpoint.iteration),
            run_id=run_id,
            tags=tags,
            description=f"{config.trainer.experiment_name}, iteration {checkpoint.iteration}",
        )
        if alias:
            client.set_registered_model_alias(name, alias, version.version)
    except MlflowException as error:
        raise ValueError(f"MLflow did not register {name!r}: {error.message}") from error
    return str(version.version), str(client.tracking_uri)


def _source(client: "MlflowClient", run_id: str, folder: Path, iteration: int) -> str:
    """Return the URI of the version's files; on a server, upload them first."""
    if not str(client.tracking_uri).startswith(("http://", "https://", "databricks")):
        return folder.absolute().as_uri()
    place = f"export/iteration_{iteration:06d}"
    client.log_artifacts(run_id, str(folder), place)
    return f"{client.get_run(run_id).info.artifact_uri}/{place}"
