"""The training state in names of the checkpoint's tensors, through `torch.distributed.checkpoint`.

Weights, their float32 masters and AdamW's averages are saved as blocks, so that a run goes on in any layout. Megatron's
own `dist_checkpointing` cannot load averages in another layout without TransformerEngine's Adam.
"""

from collections.abc import Iterator
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
        to_load: whether the tensors are there to load into; else only those that this rank saves are returned.
    """
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    steps = torch.zeros(())
    for one in policy.held():
        whole = _gathered(one, optimizers)
        steps = torch.maximum(steps, whole.pop("step"))
        if not (one.owned or to_load):
            continue
        for kind, value in {"weight": one.parameter.detach(), **whole}.items():
            for block, part in zip(one.blocks, one.divided(value), strict=True):
                place = state["model"] if kind == "weight" else state["optimizer"]
                name = block.name if kind == "weight" else f"{block.name}.{kind}"
                place.setdefault(name, Sharded(block, part.contiguous(), one.owned))
    state["optimizer"]["step"] = steps
    return state


@torch.no_grad()
def set_master(one: Held, optimizers: list[Any], value: Tensor) -> None:
    """Set the numbers that the optimiser steps to `value`, which has the parameter's shape."""
    if (found := _shard_of(one, optimizers)) is not None:
        _, main, begin, end = found
        main.copy_(value.flatten()[begin:end].to(main).view_as(main))


@torch.no_grad()
def load_training_state(policy: MegatronPolicy, optimizers: list[Any], state: dict[str, Any]) -> None:
    """Put weights, masters and averages of `state`, a loaded `training_state`, into place. Without `optimizer` in it,
    only weights."""
    for one in policy.held():

        def joined(names: list[str], place: str, one: Held = one) -> Tensor:
            return one.joined([state[place][name].local for name in names])

        names = [block.name for block in one.blocks]
        one.parameter.copy_(joined(names, "model"))
        if "optimizer" not in state:
            set_master(one, optimizers, one.parameter)
            continue
        found = _shard_of(one, optimizers)
        if found is None:
            continue
        optimizer, main, begin, end = found
        kept = optimizer.optimizer.state[main]
        for kind in (*MOMENTS, "master"):
            value = joined([f"{name}.{kind}" for name in names], "optimizer").flatten()[begin:end].to(main.device)
            if kind == "master":
                main.copy_(value.view_as(main))
            elif kind in kept:
                kept[kind].copy_(value.view_as(main))
            else:
                kept[kind] = value.view_as(main).clone()
        kept["step"] = state["optimizer"]["step"].clone()


def _gathered(one: Held, optimizers: list[Any]) -> dict[str, Tensor]:
    """Return masters and averages of a parameter, whole in this rank's part, on the CPU, and the number of steps.

    A collective of the ranks with the same part, which each have a range of the numbers.
    """
    group = (
        parallel_state.get_data_parallel_group(with_context_parallel=True)
        if one.expert is None
        else parallel_state.get_expert_data_parallel_group()
    )
    found = _shard_of(one, optimizers)
    result: dict[str, Tensor] = {}
    steps = torch.zeros(())
    for kind in (*MOMENTS, "master"):
        flat = torch.zeros(one.parameter.numel(), dtype=torch.float32, device=one.parameter.device)
        if found is not None:
            optimizer, main, begin, end = found
            kept = optimizer.optimizer.state.get(main, {})
            value = main if kind == "master" else kept.get(kind)
            if value is not None:
                flat[begin:end] = value.detach().flatten().float()
            if "step" in kept:
                steps = torch.as_tensor(float(kept["step"]))
        if group.size() > 1:
            dist.all_reduce(flat, group=group)
        result[kind] = flat.view(one.parameter.shape).cpu()
    return {**result, "step": steps}


def _shard_of(one: Held, optimizers: list[Any]) -> tuple[Any, Tensor, int, int] | None:
    """Return (optimiser, tensor that it steps, first and last index of its numbers in the parameter); None if other
    ranks have all of them."""
    for optimizer in optimizers:
        for parameter, main in _pairs(optimizer):
            if parameter is one.parameter:
                place = optimizer._get_model_param_range_map(parameter)["param"]
                return optimizer, main, place.start, place.end
    return None


def _pairs(optimizer: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield (parameter of the model, tensor that the distributed optimiser steps)."""
    groups = (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    )
    for models, mains in groups:
        for parameters, steps in zip(models, mains, strict=True):
            yield from zip(parameters, steps, strict=True)
