"""The mesh: which ranks divide a model's weights among them, and which see the same rows.

    rank = (replica * shards + shard) * tensor + place in the tensor group

`tensor` neighbouring ranks see the same rows, and each computes a part of every layer (heads, columns of matrices,
experts, vocabulary) by the plan of the model's class in `transformers`. The other dimensions see different rows: FSDP
divides the weights over the `shards`, and keeps a copy of these in each of the `replicate` replicas.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_group, _set_pg_timeout

from pipeline.config.learner import ParallelConfig


@dataclass(frozen=True)
class Mesh:
    """The ranks of a model."""

    data: DeviceMesh
    """Of `fully_shard`: (replicas and) shards, which see different rows."""
    shards: DeviceMesh
    """One-dimensional: the ranks that divide the weights."""
    tensor: DeviceMesh | None = None
    """One-dimensional: the ranks that see the same rows; None where every rank has rows of its own."""
    both: DeviceMesh | None = None
    """(shards, tensor), where there is a `tensor`."""
    expert: int = 1
    """Ranks that divide the experts; 1 or all of `tensor`."""

    @property
    def same_rows(self) -> int:
        """Number of ranks that see the same rows; neighbours."""
        return self.tensor.size() if self.tensor else 1

    @property
    def slices(self) -> bool:
        """Whether a rank has less than a whole model."""
        return self.shards.size() * self.same_rows > 1


def make_mesh(device: torch.device | str, parallel: ParallelConfig | None = None) -> Mesh:
    """The mesh of all ranks; a collective. A GPU becomes this process's own, before anything is communicated.

    Raises:
        RuntimeError: no process group is initialised.
        ValueError: the sizes do not divide the number of ranks.
    """
    if not dist.is_initialized():
        raise RuntimeError("sharding needs a process group; call torch.distributed.init_process_group first")
    device, parallel = torch.device(device), parallel or ParallelConfig()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world, tensor, replicas = dist.get_world_size(), parallel.ranks_with_same_rows, parallel.replicate
    if tensor * replicas == 1:
        flat = init_device_mesh(device.type, (world,))
        return Mesh(flat, flat)
    if world % (tensor * replicas):
        raise ValueError(f"{tensor} x {replicas} ranks of parallel.* do not divide {world} ranks")
    names = ("replicate", "shard", "tensor")
    whole = init_device_mesh(device.type, (replicas, world // (tensor * replicas), tensor), mesh_dim_names=names)
    deadline = _get_default_group()._get_backend(device).options._timeout
    for group in whole.get_all_groups():
        _set_pg_timeout(deadline, group)  # a mesh gives its groups torch's own, 10 or 30 minutes
    data = whole["replicate", "shard"] if replicas > 1 else whole["shard"]
    if tensor == 1:
        return Mesh(data, whole["shard"])
    return Mesh(data, whole["shard"], whole["tensor"], whole["shard", "tensor"], parallel.expert)
