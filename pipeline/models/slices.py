"""Sharded loading: each rank reads only its own slices of the weights, so no rank ever holds a whole model.

    transformers builds the model on the meta device ─► `place` replaces each weight by a placeholder for this rank's
    slice ─► transformers reads the slices of the placeholders ─► `adopt` gives the slices to FSDP

1. `transformers` knows all formats, names and conversions of weights, and reads no more of a file than a placeholder (a
   `DTensor`) covers. The FSDP of `transformers` has one fixed precision and no setting for when weights are freed. So
   `fsdp.shard` applies FSDP itself, to a model with weights on the meta device, and then puts in the slices.
2. The slices are the ones that FSDP would cut: equal chunks of the rows that tensor parallelism leaves to this rank.
3. Vectors and new heads are read whole: they are small, and a head that is drawn at random must be equal on all ranks.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from pipeline.models.mesh import Mesh
from pipeline.models.stages import cut, why_whole
from pipeline.models.tensor_parallel import divide
from pipeline.upstream import version_of
from pipeline.upstream.torch import StridedShard

logger = logging.getLogger(__name__)

Slots = dict[int, tuple[DTensor, list[tuple[nn.Module, str]]]]
"""`id` of a slice to the slice and the (module, parameter name) pairs that use it, several for tied weights."""


def place(lm: Any, mesh: Mesh) -> None:
    """Replace the matrices of `lm` by placeholders for this rank's slices, in place.

    Args:
        lm: model of `transformers` with its weights on the meta device.
        mesh: the ranks that divide the weights.

    Raises ValueError if `transformers` has no plan for the tensor or expert parallelism of `mesh` for the class, or the
    model cannot be cut into stages.
    """
    if mesh.tensor:
        divide(lm, mesh)
    if mesh.stage.count > 1:
        if reason := why_whole(lm.config, type(lm)._from_config):
            raise ValueError(f"{type(lm).__name__} cannot be cut into stages (actor.parallel.pipeline): {reason}")
        cut(lm, mesh.stage)
    head = lm.get_output_embeddings() if lm.can_generate() else None
    sliced = {id(parameter) for parameter in lm.base_model.parameters() if parameter.ndim > 1}
    sliced |= {id(head.weight)} if isinstance(head, nn.Linear) else set()
    placed: dict[int, nn.Parameter] = {}
    for module in lm.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in sliced or isinstance(parameter, DTensor):
                if id(parameter) not in placed:
                    placed[id(parameter)] = nn.Parameter(_slice(parameter, mesh), parameter.requires_grad)
                setattr(module, name, placed[id(parameter)])  # a tied weight stays one parameter


def _slice(parameter: Tensor, mesh: Mesh) -> DTensor:
    """Make the placeholder for this rank's rows of a weight.

    Args:
        parameter: the whole weight, or, with tensor parallelism, a `DTensor` of this rank's part.
        mesh: the ranks that divide the rows.
    """
    part, ranks, placements = parameter, mesh.shards, list[Placement]([Shard(0)])
    if isinstance(parameter, DTensor):
        assert mesh.both is not None and mesh.tensor is not None
        part, ranks, (divided,) = parameter.to_local(), mesh.both, parameter.placements
        rows = divided.is_shard(0) or (isinstance(divided, StridedShard) and divided.dim == 0)
        # FSDP cuts the rows that tensor parallelism has dealt, so a rank's rows are not one after the other.
        placements = [StridedShard(0, split_factor=mesh.tensor.size()) if rows else Shard(0), divided]
    count, _ = Shard.local_shard_size_and_offset(len(part), mesh.shards.size(), mesh.shards.get_local_rank())
    local = torch.empty(count, *part.shape[1:], dtype=parameter.dtype, device="meta")
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, ranks, placements, run_check=False, shape=shape, stride=stride)


@contextmanager
def reading_slices(mesh: Mesh) -> Iterator[None]:
    """Let `from_pretrained` of `transformers` read only this rank's slices within the block.

    In a version of `transformers` whose loader is not known here, whole weights are read, with a warning.

    Raises ValueError in `from_pretrained` if a weight in a file has another shape than in the model's configuration:
    slices of it would be read without an error. Raises ValueError before the block if the mesh has tensor parallelism
    and the loader is not known.
    """
    from safetensors import safe_open

    from pipeline.upstream.transformers import knows_loader, replaced_loader

    if not knows_loader():
        installed = version_of("transformers")
        if mesh.tensor or mesh.stage.count > 1:
            key = "actor.parallel.tensor" if mesh.tensor else "actor.parallel.pipeline"
            raise ValueError(
                f"{installed} loads weights in a way that {key} does not know; install the version of requirements/"
            )
        logger.warning("%s loads weights in an unknown way; every rank reads whole weights", installed)
        yield
        return

    def read_slices(read: Any, model: Any, state: Any, files: list[str], *more: Any, **options: Any) -> Any:
        _check_shapes(model, files)
        place(model, mesh)
        return read(model, state, files, *more, **options)

    def open_file(file: str, **options: Any) -> Any:
        # If the file were mapped, pages around the slices would stay in memory as long as the slices do.
        return safe_open(file, **options | {"backend": "pread"})

    with replaced_loader(read_slices, open_file=open_file):
        yield


def _check_shapes(lm: Any, files: list[str]) -> None:
    from safetensors import safe_open

    shapes = {name: list(parameter.shape) for name, parameter in lm.named_parameters()}
    for file in files:
        if not file.endswith(".safetensors"):
            continue
        with safe_open(file, framework="pt") as weights:
            for name in sorted(weights.keys() & shapes.keys()):
                stored = weights.get_slice(name).get_shape()
                # A weight of one row is a head: it is read whole, and transformers compares its shape.
                if stored != shapes[name] and shapes[name][0] > 1:
                    raise ValueError(f"{file} holds {name} of shape {stored}, but config.json says {shapes[name]}")


def take_slices(module: nn.Module, mesh: Mesh) -> Slots:
    """Take this rank's slices out of `module`, and put weights on the meta device in their place, for `fully_shard`."""
    slots: Slots = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                slots.setdefault(id(parameter), (parameter, []))[1].append((part, name))
    for slice_, places in slots.values():
        whole: Tensor = torch.empty(slice_.shape, dtype=slice_.dtype, device="meta")
        if slice_.device_mesh.ndim > 1:
            whole = distribute_tensor(whole, mesh.tensor, slice_.placements[1:], src_data_rank=None)
        empty = nn.Parameter(whole, slice_.requires_grad)
        for part, name in places:
            setattr(part, name, empty)
    return slots


def adopt(slots: Slots) -> None:
    """Put the slices that `take_slices` took out back into their modules, to which `fully_shard` was applied since."""
    for loaded, places in slots.values():
        part, name = places[0]
        cut = getattr(part, name)
        local = loaded.to_local().detach()
        if cut.to_local().shape != local.shape:
            raise RuntimeError(f"FSDP cuts {name} into {tuple(cut.to_local().shape)}, read was {tuple(local.shape)}")
        sharded = DTensor.from_local(
            local, cut.device_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride()
        )
        parameter = nn.Parameter(sharded, cut.requires_grad)
        for part, name in places:
            setattr(part, name, parameter)
