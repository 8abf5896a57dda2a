"""The mesh: which ranks divide a model's weights among them, and which see the same rows.

    rank = (replica * shards + shard) * tensor + place in the tensor group
    rank = (group * sequence + place in the sequence) * tensor + place in the tensor group

`sequence * tensor` neighbouring ranks see the same rows. Those of a tensor group each compute a part of every layer
(heads, columns of matrices, experts, vocabulary) by the plan of the model's class in `transformers`; those of a
sequence each compute a part of the positions (`sequence_parallel.py`). FSDP divides the weights over the `shards`,
which the ranks of a sequence belong to, and keeps a copy of these in each of the `replicate` replicas.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.config.learner import ParallelConfig


@dataclass(frozen=True)
class Mesh:
    """The ranks of a model."""

    data: DeviceMesh
    """Of `fully_shard`: (replicas and) shards, which see different rows or positions."""
    shards: DeviceMesh
    """One-dimensional: the ranks that divide the weights."""
    tensor: DeviceMesh | None = None
    """One-dimensional: the ranks that each compute a part of every layer; None where each computes whole layers."""
    both: DeviceMesh | None = None
    """(shards, tensor), where there is a `tensor`."""
    expert: int = 1
    """Ranks that divide the experts; 1 or all of `tensor`."""
    sequence: DeviceMesh | None = None
    """One-dimensional: the ranks that each have a part of the positions; None where each has all."""

    @property
    def same_rows(self) -> int:
        """Number of ranks that see the same rows; neighbours."""
        return math.prod(mesh.size() for mesh in (self.tensor, self.sequence) if mesh)

    @property
    def positions(self) -> dist.ProcessGroup | None:
        """The ranks that divide the positions of a sequence among them; None where each has all."""
        return self.sequence.get_group() if self.sequence else None

    @property
    def slices(self) -> bool:
        """Whether a rank has less than a whole model."""
        return self.shards.size() > 1 or self.tensor is not None


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
    world, tensor, replicas = dist.get_world_size(), parallel.tensor, parallel.replicate
    same_rows, sequence = parallel.ranks_with_same_rows, None
    if same_rows * replicas == 1:
        flat = init_device_mesh(device.type, (world,))
        return Mesh(flat, flat)
    if world % (same_rows * replicas):
        raise ValueError(f"{same_rows} x {replicas} ranks of parallel.* do not divide {world} ranks")
    if parallel.sequence > 1:
        shape, names = (world // same_rows, parallel.sequence, tensor), ("group", "sequence", "tensor")
        sequence = init_device_mesh(device.type, shape, mesh_dim_names=names)["sequence"]
    # peft takes the whole size of weights for an adapter's if they are divided over a mesh of this name alone.
    names = ("replicate", "fsdp", "tensor")
    whole = init_device_mesh(device.type, (replicas, world // (tensor * replicas), tensor), mesh_dim_names=names)
    data = whole["replicate", "fsdp"] if replicas > 1 else whole["fsdp"]
    if tensor == 1:
        return Mesh(data, whole["fsdp"], sequence=sequence)
    return Mesh(data, whole["fsdp"], whole["tensor"], whole["fsdp", "tensor"], parallel.expert, sequence)
