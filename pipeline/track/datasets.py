"""Makes the data set inputs of an MLflow run from a run's prompt files."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

TAIL = 1 << 16
"""Number of bytes at the end of a file that are hashed; the statistics of a parquet file are there."""


def dataset_inputs(settings: Mapping[str, Any]) -> "list[DatasetInput]":
    """Return one input per entry of `data.train_files` and `data.val_files`. MLflow stores equal inputs once.

    Args:
        settings: the settings of the run by full name.
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
    """Hash an address together with the sizes and ends of the local files there, to 16 hexadecimal digits."""
    path = Path(address)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    digest = hashlib.blake2b(address.encode(), digest_size=8)
    for file in files:
        with open(file, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL))
            digest.update(f"{file.name}:{size}:".encode() + stream.read())
    return digest.hexdigest()
