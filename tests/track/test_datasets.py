"""Prompt files as data set inputs of an MLflow run."""

import json
from pathlib import Path

from mlflow.tracking import MlflowClient

from pipeline.track.datasets import TAIL, dataset_inputs
from pipeline.track.mlflow_logger import MlflowLogger


def test_prompt_files_are_inputs_of_the_run_once(tmp_path: Path) -> None:
    train = tmp_path / "train.parquet"
    train.write_bytes(b"rows")
    config = {"data.train_files": str(train), "data.val_files": ["s3://bucket/val", str(tmp_path / "*.parquet")]}
    run_dir = tmp_path / "runs" / "mine"
    run_dir.mkdir(parents=True)
    for resume in (False, True):
        logger = MlflowLogger(run_dir, config, "project", "mine", resume=resume)
        logger.start()
    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    inputs = client.get_run((run_dir / "mlflow_run_id").read_text().strip()).inputs.dataset_inputs
    described = {(each.dataset.name, each.dataset.source_type, each.tags[0].value) for each in inputs}
    assert len(inputs) == 3 and described == {
        ("train.parquet", "local", "training"),
        ("val", "s3", "validation"),
        ("*.parquet", "local", "validation"),
    }
    sources = {each.dataset.name: json.loads(each.dataset.source)["uri"] for each in inputs}
    assert sources["train.parquet"] == train.as_uri() and sources["val"] == "s3://bucket/val"


def test_a_digest_changes_with_the_data(tmp_path: Path) -> None:
    file = tmp_path / "data" / "a.parquet"
    file.parent.mkdir()
    digests = set()
    for content in (b"one", b"two", b"two" + bytes(TAIL)):
        file.write_bytes(content)
        inputs = dataset_inputs({"data.train_files": [str(file), str(file.parent)]})
        digests |= {each.dataset.digest for each in inputs}
    assert len(digests) == 6
