"""The prompt files of a run as data set inputs of its MLflow run."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

TAIL = 1 << 16
"""Bytes at the end of a file that go into its digest; the statistics of a parquet file are there."""


def dataset_inputs(settings: Mapping[str, Any]) -> "list[DatasetInput]":
    """Return one input per entry of `data.train_files` and `data.val_files`. MLflow keeps equal inputs once.

    Args:
        settings: the settings of the run by their dotted names.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for context, key in (("training", "data.train_files"), ("validation", "data.val_files")):
        files = settings.get(key) or []
        for address in [files] if isinstance(files, str) else files:
            scheme, _, rest = address.partition("://")
            dataset = Dataset(
                name=Path(rest or address).name or address,
                digest=_digest(address),
                source_type=scheme if rest else "local",
                source=json.dumps({"uri": address if rest else Path(address).absolute().as_uri()}),
            )
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", context)]))
    return inputs


def _digest(address: str) -> str:
    """Hash an address with the sizes and ends of the local files there, as 16 hexadecimal digits."""
    path = Path(address)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    digest = hashlib.blake2b(address.encode(), digest_size=8)
    for file in files:
        with open(file, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL))
            digest.update(f"{file.name}:{size}:".encode() + stream.read())
    return digest.hexdigest()
