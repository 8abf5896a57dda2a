"""The mesh: groups of ranks that divide a model's weights, and groups of ranks that process the same rows.

    rank = stage * (ranks / stages) + place
    place = (replica * shards + shard) * tensor + place in the tensor group
    place = (group * sequence + place in the sequence) * tensor + place in the tensor group

Each stage of a pipeline has some of the layers (`stages.py`), and neighbouring ranks. All that follows is within a
stage. `sequence * tensor` neighbouring ranks process the same rows, as do the ranks with their places in other stages.
Each rank of a tensor group computes a part of every layer (heads, columns of matrices, experts, vocabulary) by the plan
of the model's class in `transformers`. Each rank of a sequence group computes a part of the positions
(`sequence_parallel.py`). FSDP divides the weights over the `shards` ranks of a replica, and each of the
`parallel.replicate` replicas has a whole copy. The ranks of a sequence group are in one replica and hold different
shards.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.config.learner import ParallelConfig
from pipeline.upstream.torch import share_deadline


@dataclass(frozen=True)
class PipelineStage:
    """A stage of a pipeline: this rank's part of the layers."""

    number: int = 0
    count: int = 1
    """Number of stages; 1 without a pipeline."""
    group: dist.ProcessGroup | None = None
    """The ranks with this rank's place in each stage, in the order of the stages; None without a pipeline."""

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number == self.count - 1


@dataclass(frozen=True)
class Mesh:
    """The ranks of a model, or of a stage of it."""

    data: DeviceMesh
    """Mesh for `fully_shard`: (replicas, shards), or (shards) with one replica. Its ranks process different rows or
    positions."""
    shards: DeviceMesh
    """One-dimensional mesh of the ranks over which FSDP divides the weights."""
    tensor: DeviceMesh | None = None
    """One-dimensional mesh of the ranks that each compute a part of every layer; None if each rank computes whole
    layers."""
    both: DeviceMesh | None = None
    """Two-dimensional mesh (shards, tensor); None if `tensor` is None."""
    expert: int = 1
    """Number of ranks that divide the experts: 1, or all ranks of `tensor`."""
    sequence: DeviceMesh | None = None
    """One-dimensional mesh of the ranks that each compute a part of the positions; None if each computes all."""

    stage: PipelineStage = PipelineStage()
    """This rank's stage of a pipeline."""

    @property
    def neighbours(self) -> int:
        """Number of neighbouring ranks that process the same rows, in each stage."""
        return math.prod(mesh.size() for mesh in (self.tensor, self.sequence) if mesh)

    @property
    def same_rows(self) -> int:
        """Number of ranks that process the same rows, in all stages."""
        return self.neighbours * self.stage.count

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of a stage; of all ranks without a pipeline."""
        return self.data.size() * (self.tensor.size() if self.tensor else 1)

    @property
    def first_rank(self) -> int:
        """First rank of this rank's stage."""
        return self.stage.number * self.stage_ranks

    def rows_group(self, rank: int) -> int:
        """Return the number, from 0, of the group of ranks with the same rows to which `rank` belongs."""
        return rank % self.stage_ranks // self.neighbours

    def leads(self, rank: int) -> bool:
        """Return True for one rank of each group with the same rows: the first one in the last stage, which knows the
        loss."""
        return rank // self.stage_ranks == self.stage.count - 1 and rank % self.neighbours == 0

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks among which the positions of a sequence are divided; 1 without sequence parallelism."""
        return self.sequence.size() if self.sequence else 1

    @property
    def positions(self) -> dist.ProcessGroup | None:
        """Process group of the ranks among which the positions of a sequence are divided; None if each computes all."""
        return self.sequence.get_group() if self.sequence else None

    @property
    def slices(self) -> bool:
        """True if each rank has only a slice of the model's weights."""
        return self.shards.size() > 1 or self.tensor is not None or self.stage.count > 1


def make_mesh(device: torch.device | str, parallel: ParallelConfig | None = None) -> Mesh:
    """Make the mesh of all ranks; a collective. If `device` is a GPU, it becomes the current device of this process.

    Args:
        device: this rank's device.
        parallel: sizes of the groups; None divides the weights over all ranks.

    Raises:
        RuntimeError: no process group is initialised.
        ValueError: the product of the sizes does not divide the number of ranks.
    """
    if not dist.is_initialized():
        raise RuntimeError("sharding needs a process group; call torch.distributed.init_process_group first")
    device, parallel = torch.device(device), parallel or ParallelConfig()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world, tensor, replicas, stages = dist.get_world_size(), parallel.tensor, parallel.replicate, parallel.pipeline
    same_rows, sequence, stage = parallel.ranks_with_same_rows, None, PipelineStage()
    if same_rows * replicas == 1:
        flat = init_device_mesh(device.type, (world,))
        return Mesh(flat, flat)
    if world % (same_rows * replicas):
        raise ValueError(f"{same_rows} x {replicas} ranks of parallel.* do not divide {world} ranks")
    if parallel.sequence > 1:
        shape = (stages, world // same_rows, parallel.sequence, tensor)
        sequence = _device_mesh(device, shape, ("pipeline", "group", "sequence", "tensor"))["sequence"]
    # peft takes the whole size of weights for an adapter's if `fsdp` is the only name of the mesh that divides them.
    names = ("pipeline", "replicate", "fsdp", "tensor")
    whole = _device_mesh(device, (stages, replicas, world // (tensor * replicas * stages), tensor), names)
    if stages > 1:
        stage = PipelineStage(whole["pipeline"].get_local_rank(), stages, whole["pipeline"].get_group())
    data = whole["replicate", "fsdp"] if replicas > 1 else whole["fsdp"]
    if tensor == 1:
        return Mesh(data, whole["fsdp"], sequence=sequence, stage=stage)
    return Mesh(data, whole["fsdp"], whole["tensor"], whole["fsdp", "tensor"], parallel.expert, sequence, stage)


def _device_mesh(device: torch.device, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Make a mesh of all ranks. Collectives in its groups get the timeout of the default process group, instead of
    torch's default of 10 or 30 minutes."""
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    share_deadline(mesh, device)
    return mesh
