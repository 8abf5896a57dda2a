"""Prompt files as data set inputs of an MLflow run; `test_tracker.py` logs them."""

import json
from pathlib import Path

from pipeline.track.datasets import TAIL, dataset_inputs


def test_prompt_files_are_inputs(tmp_path: Path) -> None:
    train = tmp_path / "train.parquet"
    train.write_bytes(b"rows")
    config = {"data.train_files": str(train), "data.val_files": ["s3://bucket/val", str(tmp_path / "*.parquet")]}
    inputs = dataset_inputs(config)
    assert [(each.dataset.name, each.dataset.source_type, each.tags[0].value) for each in inputs] == [
        ("train.parquet", "local", "training"),
        ("val", "s3", "validation"),
        ("*.parquet", "local", "validation"),
    ]
    sources = [json.loads(each.dataset.source)["uri"] for each in inputs]
    assert sources[:2] == [train.as_uri(), "s3://bucket/val"]


def test_a_digest_changes_with_the_data(tmp_path: Path) -> None:
    file = tmp_path / "data" / "a.parquet"
    file.parent.mkdir()
    digests = set()
    for content in (b"one", b"two", b"two" + bytes(TAIL)):
        file.write_bytes(content)
        inputs = dataset_inputs({"data.train_files": [str(file), str(file.parent)]})
        digests |= {each.dataset.digest for each in inputs}
    assert len(digests) == 6
