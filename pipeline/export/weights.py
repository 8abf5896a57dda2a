"""The weights of a checkpoint in one process, without GPUs and without a process group, whatever sharded them.

A checkpoint's index is read as PyTorch writes it, with pickle: like code, it has to come from somebody you trust.
"""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def read_weights(folder: Path, learner: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Whole weights of the `actor` or the `critic` by their names in the trained module.

    They are read one after the other straight into the result, so the memory needed is that of the result.

    Args:
        folder: a whole checkpoint.
        learner: whose weights.
        dtype: what floating-point weights become; None leaves them as they were trained.

    Raises:
        ValueError: the checkpoint has no such learner.
        OSError: a file cannot be read.
    """
    metadata, prefix = dcp.FileSystemReader(folder).read_metadata(), f"{learner}.model."
    state: dict[str, Tensor] = {}
    for name, stored in metadata.state_dict_metadata.items():
        if name.startswith(prefix) and isinstance(stored, TensorStorageMetadata):
            kind = stored.properties.dtype
            state[name] = torch.empty(stored.size, dtype=dtype if dtype and kind.is_floating_point else kind)
    if not state:
        raise ValueError(f"{folder} holds no weights of the {learner}; was there one in the run?")
    with warnings.catch_warnings():
        # It says that it takes this for a single process, which this is.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}
