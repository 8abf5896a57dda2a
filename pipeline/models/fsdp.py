"""FSDP2: sharding, gradient norm, gathering and saving.

1. `fully_shard` is applied to every transformer block, then to the root, which keeps embedding and head in one group
   (they may be tied). The same code runs over gloo on CPUs and nccl on GPUs.
2. Gradients are summed over ranks, not averaged (FSDP's default): losses are divided by counts over all ranks.

Each `backward` is a collective: all ranks must run the same number of micro-batches.
"""

import math
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pipeline.config.learner import FSDPConfig

if TYPE_CHECKING:
    from pipeline.models.pretrained import Pretrained

Module = TypeVar("Module", bound=nn.Module)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str, key: str) -> torch.dtype:
    """The torch type called `name`; `key` is the configuration key it came from.

    Raises ValueError if `name` is none of `DTYPES`.
    """
    if name not in DTYPES:
        raise ValueError(f"{key}={name} is not a known type; use one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def transformer_blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost transformer blocks of a model, in order.

    These are the `_no_split_modules` of a `transformers` model, or else its decoder's `layers`. A block with an
    embedding is left to the root, where a tied head needs it.
    """
    names = {name for child in module.modules() for name in getattr(child, "_no_split_modules", None) or ()}
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for child in module.modules():
        if type(child).__name__ in names and child not in inside:
            descendants = set(child.modules())
            if not any(isinstance(part, nn.Embedding) for part in descendants):
                blocks.append(child)
                inside |= descendants
    if blocks:
        return blocks
    for child in module.modules():
        layers = getattr(child, "layers", None)
        if isinstance(layers, nn.ModuleList):
            return list(layers)
    return []


def shard(module: Module, config: FSDPConfig, device: torch.device | str) -> Module:
    """Shard `module`, which is equal on all ranks, over the default process group, in place, and move it to `device`.

    Returns:
        `module`: its parameters are DTensors, and its gradients are summed over ranks.

    Raises:
        RuntimeError: no process group is initialised.
        ValueError: a type in `config` is unknown.
    """
    if not dist.is_initialized():
        raise RuntimeError("sharding needs a process group; call torch.distributed.init_process_group first")
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # On CPUs null leaves the type of the weights, which need not be the same in all of them.
    computed = config.compute_dtype("", device.type == "cuda")
    policy = MixedPrecisionPolicy(
        param_dtype=torch_dtype(computed, "fsdp.param_dtype") if computed else None,
        reduce_dtype=torch_dtype(config.reduce_dtype, "fsdp.reduce_dtype"),
    )
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": policy,
        "reshard_after_forward": config.reshard_after_forward,
        **({"offload_policy": CPUOffloadPolicy()} if config.offload == "all" else {}),
    }
    for block in transformer_blocks(module):
        fully_shard(block, **options)
    fully_shard(module, **options)
    if config.offload == "all":
        # The parameters stay in host memory.
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                setattr(part, name, buffer.to(device))
    else:
        module.to(device)  # buffers; fully_shard moved the parameters
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # A plain sum on every backend: gloo has neither AVG nor premultiplied sums.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return module


def clip_grad_norm(params: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale gradients down to a global 2-norm of at most `max_norm`; the norm before that, the same on every rank.

    Gradients with a norm that is not finite are left as they are: skip that optimiser step.
    """
    with_grad = [parameter for parameter in params if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in with_grad if parameter.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    value = float(norm)
    if math.isfinite(value):
        nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm)
    return value


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and persistent buffers, unsharded, in CPU memory on rank 0; an empty dict on others. A collective.

    A tied parameter appears once, under its first name.
    """
    keep = not dist.is_initialized() or dist.get_rank() == 0
    persistent = model.state_dict().keys()
    state: dict[str, Tensor] = {}
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        if name not in persistent:
            continue
        # One tensor at a time is gathered, to save memory.
        gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            state[name] = gathered.detach().to("cpu", copy=True)
        del gathered
    return state


def save_hf(model: "Pretrained", tokenizer: Any, folder: str | Path) -> None:
    """Save the model and its tokenizer as a Hugging Face folder (safetensors); a collective.

    Rank 0 writes beside `folder` and renames, so an interrupted save never looks like a model. An older `folder` is
    replaced.

    Raises RuntimeError, on every rank, if rank 0 could not write.
    """
    folder = Path(folder)
    state = full_state_dict(model)
    rank = dist.get_rank() if dist.is_initialized() else 0
    failure: list[str | None] = [None]
    error: OSError | None = None
    if rank == 0:
        partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")
        try:
            partial.mkdir(parents=True)
            named = {model.hf_name(name): tensor for name, tensor in state.items()}
            model.lm.save_pretrained(partial, state_dict=named)
            tokenizer.save_pretrained(partial)
            old = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.old")
            if folder.exists():
                folder.rename(old)
            partial.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as problem:
            shutil.rmtree(partial, ignore_errors=True)
            error, failure = problem, [str(problem)]
    if dist.is_initialized():
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise RuntimeError(f"the model could not be saved in {folder}: {failure[0]}") from error
