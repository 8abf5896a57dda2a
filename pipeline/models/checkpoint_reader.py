"""Reads sharded checkpoints (`torch.distributed.checkpoint`) without unpickling what a stranger may have written.

PyTorch pickles a checkpoint's index (`.metadata`) and its plain values (such as a learning rate), and reads both with
`pickle`, which runs any code that a file asks for. Here the index may name the few classes of an index and nothing
else, and values are read with `weights_only=True`. So a checkpoint of unknown origin can be wrong, but it cannot run
code.
"""

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

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
"""Classes and functions that PyTorch's index of a checkpoint consists of, by module; types of tensors come on top."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an index")
        return super().find_class(module, name)


class CheckpointReader(dcp.FileSystemReader):
    """Reads a checkpoint's folder; its index is unpickled with the classes of an index only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index.

        Raises:
            ValueError: it is damaged, names a class that is no part of an index, or a file outside of the folder.
            OSError: it cannot be read.
        """
        file = Path(self.path) / ".metadata"
        try:
            index = _IndexUnpickler(io.BytesIO(file.read_bytes())).load()
            names = {info.relative_path for info in index.storage_data.values()}
        # Bytes that are no pickle raise nearly anything.
        except (pickle.UnpicklingError, AttributeError, EOFError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} cannot be read as the index of a checkpoint: {error}") from error
        outside = sorted(name for name in names if Path(name).name != name)
        if outside:
            raise ValueError(f"{file} names {outside[0]!r}, which is no file of its folder")
        return index


class _PlainValues(dcp.DefaultLoadPlanner):
    """Reads values that are no tensors with `weights_only=True`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # The planner of PyTorch unpickles what it is given, so it is given a copy of what was read safely.
        copy = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), copy)
        copy.seek(0)
        super().load_bytes(read_item, copy)


def load_checkpoint(state: dict[str, Any], folder: str | Path, no_dist: bool = False) -> None:
    """Load the checkpoint in `folder` into the tensors of `state`; a collective unless `no_dist`.

    Raises:
        ValueError: the index is damaged or could run code.
        OSError: a file cannot be read.
        torch.distributed.checkpoint.CheckpointException: a part of `state` is missing or unreadable.
    """
    reader = CheckpointReader(folder)
    # Within its collective PyTorch would wrap the sentence about a damaged index in its own traces.
    reader.read_metadata()
    with warnings.catch_warnings():
        # PyTorch says that it takes this for a single process, which it is where `no_dist` is set.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, planner=_PlainValues(), no_dist=no_dist)
