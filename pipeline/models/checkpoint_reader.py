"""Reads sharded checkpoints (`torch.distributed.checkpoint`) of unknown origin without running code from them.

PyTorch pickles the index of a checkpoint (the file `.metadata`) and all values that are not tensors (such as a learning
rate), and unpickling can run any code. Here only the classes that an index needs are unpickled from it, and other
values are read with `weights_only=True`.
"""

import io
import pickle
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from pipeline.errors import short_reason

CHECKPOINT = "torch.distributed.checkpoint"
INDEX_CLASSES = {
    f"{CHECKPOINT}.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    f"{CHECKPOINT}.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
}
"""Module to the names of its classes and functions that the index of a checkpoint may contain. The dtypes of torch are
also allowed."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of an index")
        return super().find_class(module, name)


class CheckpointReader(dcp.FileSystemReader):
    """Reader of a checkpoint's folder that unpickles only the classes in `INDEX_CLASSES` from the index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index, the file `.metadata`.

        Raises:
            ValueError: the index is damaged, contains a class that is not in `INDEX_CLASSES`, or names a file outside
                of the folder.
            OSError: the index cannot be read.
        """
        file = Path(self.path) / ".metadata"
        try:
            index = _IndexUnpickler(io.BytesIO(file.read_bytes())).load()
            names = {info.relative_path for info in index.storage_data.values()}
        # Unpickling arbitrary bytes may raise any of these.
        except (pickle.UnpicklingError, AttributeError, EOFError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} cannot be read as the index of a checkpoint: {error}") from error
        outside = sorted(name for name in names if Path(name).name != name)
        if outside:
            raise ValueError(f"{file} names {outside[0]!r}, which is not a file in its folder")
        return index


class _PlainValues(dcp.DefaultLoadPlanner):
    """Load planner that reads values other than tensors with `weights_only=True`.

    Args:
        optional: last parts of names (after the last dot) of tensors that the checkpoint may lack.
    """

    def __init__(self, optional: Collection[str]) -> None:
        super().__init__()
        self._optional = optional

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        there = metadata.state_dict_metadata
        for name in [name for name in self.state_dict if name.rpartition(".")[2] in self._optional]:
            if name not in there:
                del self.state_dict[name]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # PyTorch's planner unpickles its argument, so it gets a new pickle of the value that was read safely.
        copy = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), copy)
        copy.seek(0)
        super().load_bytes(read_item, copy)


def load_checkpoint(
    state: dict[str, Any], folder: str | Path, no_dist: bool = False, optional: Collection[str] = ()
) -> None:
    """Load the checkpoint in `folder` into the tensors and values of `state`, in place.

    Args:
        state: names, nested or not, to tensors and plain values.
        folder: the checkpoint's folder.
        no_dist: whether this process loads by itself; else the call is a collective of all ranks.
        optional: last parts of tensor names (after the last dot). Such a tensor stays as it is if the checkpoint lacks
            it.

    Raises:
        ValueError: the index is damaged or could run code, or a part of `state` is missing or unreadable.
        OSError: a file cannot be read.
    """
    reader = CheckpointReader(folder)
    # Inside of its collective PyTorch would hide the error of a damaged index in its own traces.
    reader.read_metadata()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(state, storage_reader=reader, planner=_PlainValues(optional), no_dist=no_dist)
        except CheckpointException as error:
            reason = next(iter(error.failures.values()))[0]
            # An error of torch's readers names neither the file nor the damage.
            raise ValueError(f"the checkpoint {folder} cannot be loaded: {short_reason(reason)}") from error
