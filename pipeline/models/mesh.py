"""The mesh: the ranks that divide a model's weights among them, and the ranks that see the same rows.

    rank = (replica * shards + shard) * tensor + place in the tensor group
    rank = (group * sequence + place in the sequence) * tensor + place in the tensor group

`sequence * tensor` neighbouring ranks see the same rows. Each rank of a tensor group computes a part of every layer
(heads, columns of matrices, experts, vocabulary) by the plan of the model's class in `transformers`; each rank of a
sequence computes a part of the positions (`sequence_parallel.py`). FSDP divides the weights over the `shards`, which
contain the ranks of a sequence, and keeps a copy of these in each of the `replicate` replicas.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.config.learner import ParallelConfig
from pipeline.upstream.torch import share_deadline


@dataclass(frozen=True)
class Mesh:
    """The ranks of a model."""

    data: DeviceMesh
    """Mesh for `fully_shard`: (replicas and) shards, which see different rows or positions."""
    shards: DeviceMesh
    """One-dimensional: the ranks that divide the weights."""
    tensor: DeviceMesh | None = None
    """One-dimensional: the ranks that each compute a part of every layer; None if each computes whole layers."""
    both: DeviceMesh | None = None
    """(shards, tensor), if there is a `tensor`."""
    expert: int = 1
    """Ranks that divide the experts; 1 or all of `tensor`."""
    sequence: DeviceMesh | None = None
    """One-dimensional: the ranks that each have a part of the positions; None if each has all."""

    @property
    def same_rows(self) -> int:
        """Number of ranks that see the same rows; neighbours."""
        return math.prod(mesh.size() for mesh in (self.tensor, self.sequence) if mesh)

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that divide the positions among them."""
        return self.sequence.size() if self.sequence else 1

    @property
    def positions(self) -> dist.ProcessGroup | None:
        """The ranks that divide the positions of a sequence among them; None if each has all."""
        return self.sequence.get_group() if self.sequence else None

    @property
    def slices(self) -> bool:
        """True if a rank has less than a whole model."""
        return self.shards.size() > 1 or self.tensor is not None


def make_mesh(device: torch.device | str, parallel: ParallelConfig | None = None) -> Mesh:
    """Make the mesh of all ranks; a collective. A GPU becomes this process's own, before anything is communicated.

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
        sequence = _device_mesh(device, shape, names)["sequence"]
    # peft takes the whole size of weights for an adapter's if `fsdp` is the only name of the mesh that divides them.
    names = ("replicate", "fsdp", "tensor")
    whole = _device_mesh(device, (replicas, world // (tensor * replicas), tensor), names)
    data = whole["replicate", "fsdp"] if replicas > 1 else whole["fsdp"]
    if tensor == 1:
        return Mesh(data, whole["fsdp"], sequence=sequence)
    return Mesh(data, whole["fsdp"], whole["tensor"], whole["fsdp", "tensor"], parallel.expert, sequence)


def _device_mesh(device: torch.device, shape: tuple[int, int, int], names: tuple[str, str, str]) -> DeviceMesh:
    """Make a mesh of all ranks whose groups wait as long as the whole group does; torch gives them 10 or 30 minutes."""
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    share_deadline(mesh, device)
    return mesh
