"""The training state in names of the checkpoint's tensors, through `torch.distributed.checkpoint`.

Weights, their float32 masters and AdamW's averages are saved as blocks, so that a run goes on in any layout. Megatron's
own `dist_checkpointing` cannot load averages in another layout without TransformerEngine's Adam.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pipeline.megatron.names import Held, TensorBlock
from pipeline.megatron.policy import MegatronPolicy

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
KINDS = (*MOMENTS, MASTER)
"""Tensors of the optimiser for each parameter: AdamW's averages, and the numbers that it steps."""


class Sharded(Tensor):
    """A tensor of the checkpoint with the block that this rank has, in the form that torch's planners ask for.

    Args:
        block: place of the block.
        local: the block.
        owned: whether this rank saves the block.
    """

    block: TensorBlock
    local: Tensor
    owned: bool

    @staticmethod
    def __new__(cls, block: TensorBlock, local: Tensor, owned: bool) -> "Sharded":
        made: Sharded = torch.Tensor._make_wrapper_subclass(cls, block.shape, dtype=local.dtype, device=local.device)
        made.block, made.local, made.owned = block, local, owned
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a block of a checkpoint")

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.block.start), torch.Size(self.block.extent))

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        if not self.owned:
            return []
        properties = TensorProperties(dtype=self.local.dtype)
        data = TensorWriteData(self._chunk(), properties, torch.Size(self.block.shape))
        return [WriteItem(MetadataIndex(fqn, torch.Size(self.block.start)), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def __get_tensor_shard__(self, _: Any) -> Tensor:
        return self.local


def training_state(policy: MegatronPolicy, optimizers: list[Any], to_load: bool = False) -> dict[str, Any]:
    """Return weights, masters and averages of this rank; a collective.

    Args:
        policy: this rank's stage.
        optimizers: Megatron's optimisers.
        to_load: whether the tensors are there to load into; else only the tensors that this rank saves are returned.
    """
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    found = _shards(optimizers)
    steps = torch.zeros(())
    for one in policy.held():
        shard = found.get(one.parameter)
        if shard is not None:
            steps = torch.maximum(steps, shard.steps)
        values = {} if to_load else {kind: _gathered(one, shard, kind) for kind in KINDS}
        if not (one.owned or to_load):
            continue
        for block, part in zip(one.blocks, one.divided(one.parameter.detach()), strict=True):
            state["model"].setdefault(block.name, Sharded(block, part.contiguous(), one.owned))
        for kind in KINDS:
            value = values.get(kind, torch.zeros(one.parameter.shape, dtype=torch.float32))
            for block, part in zip(one.blocks, one.divided(value), strict=True):
                state["optimizer"].setdefault(f"{block.name}.{kind}", Sharded(block, part.contiguous(), one.owned))
    state["optimizer"]["step"] = steps
    return state


@torch.no_grad()
def set_weights(optimizers: list[Any], weights: Iterable[tuple[Held, Tensor]]) -> None:
    """Set parameters, and the numbers that the optimisers step, to values of the parameters' shapes."""
    found = _shards(optimizers)
    for one, value in weights:
        one.parameter.copy_(value)
        if (shard := found.get(one.parameter)) is not None:
            shard.main.copy_(shard.cut(value))


@torch.no_grad()
def load_training_state(policy: MegatronPolicy, optimizers: list[Any], state: dict[str, Any]) -> None:
    """Put weights, masters and averages of `state`, a loaded `training_state`, into place. Without `optimizer` in it,
    only weights."""

    def joined(one: Held, place: str, ending: str = "") -> Tensor:
        return one.joined([state[place][block.name + ending].local for block in one.blocks])

    held = policy.held()
    set_weights(optimizers, ((one, joined(one, "model")) for one in held))
    if "optimizer" not in state:
        return
    found = _shards(optimizers)
    for one in held:
        if (shard := found.get(one.parameter)) is None:
            continue
        shard.main.copy_(shard.cut(joined(one, "optimizer", f".{MASTER}")))
        for kind in MOMENTS:
            shard.state[kind] = shard.cut(joined(one, "optimizer", f".{kind}")).clone()
        shard.state["step"] = state["optimizer"]["step"].clone()


def _gathered(one: Held, shard: "_Shard | None", kind: str) -> Tensor:
    """Return masters or averages of a parameter, whole in this rank's part, on the CPU.

    A collective of the ranks with the same part, which each have a range of the numbers.
    """
    group = (
        parallel_state.get_data_parallel_group(with_context_parallel=True)
        if one.expert is None
        else parallel_state.get_expert_data_parallel_group()
    )
    flat = torch.zeros(one.parameter.numel(), dtype=torch.float32, device=one.parameter.device)
    # The averages begin with the first step.
    if shard is not None and (value := shard.main if kind == MASTER else shard.state.get(kind)) is not None:
        flat[shard.begin : shard.end] = value.detach().flatten().float()
    if group.size() > 1:
        dist.all_reduce(flat, group=group)
    return flat.view(one.parameter.shape).cpu()


@dataclass(frozen=True)
class _Shard:
    """The numbers of a parameter that this rank's optimiser steps."""

    main: Tensor
    """The numbers: a part of the parameter, or float32 masters of it."""
    state: dict[str, Any]
    """AdamW's state; empty before the first step."""
    begin: int
    end: int
    """Index of the first number in the parameter, and after the last one."""

    @property
    def steps(self) -> Tensor:
        """Number of steps."""
        return torch.as_tensor(float(self.state.get("step", 0.0)))

    def cut(self, value: Tensor) -> Tensor:
        """Return these numbers of `value`, which has the parameter's shape, in the shape of `main`."""
        return value.flatten()[self.begin : self.end].to(self.main).view_as(self.main)


def _shards(optimizers: list[Any]) -> dict[Any, _Shard]:
    """Return the shards of this rank by parameter; none of a parameter whose numbers are all on other ranks."""
    found = {}
    for optimizer in optimizers:
        for parameter, main in _pairs(optimizer):
            place = optimizer._get_model_param_range_map(parameter)["param"]
            found[parameter] = _Shard(main, optimizer.optimizer.state[main], place.start, place.end)
    return found


def _pairs(optimizer: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield (parameter of the model, tensor that the distributed optimiser steps)."""
    groups = (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    )
    for models, mains in groups:
        for parameters, steps in zip(models, mains, strict=True):
            yield from zip(parameters, steps, strict=True)
