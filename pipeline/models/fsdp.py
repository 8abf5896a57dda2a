"""FSDP2: sharding, gradient norm, gathering and saving.

1. `fully_shard` is applied to every transformer block, to each embedding that is not tied to the head, and last to the
   root module, which contains the head. The same code runs over gloo on CPUs and nccl on GPUs.
2. Gradients are summed over ranks, not averaged as FSDP does by default, since losses are divided by counts over all
   ranks.

Each `backward` is a collective: all ranks must run the same number of micro-batches.
"""

import contextlib
import errno
import math
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pipeline.config.learner import FSDPConfig
from pipeline.models import lora
from pipeline.models.mesh import Mesh, make_mesh
from pipeline.models.precision import torch_dtype
from pipeline.models.save import WeightWriter, gathered_blocks, join, partial_of, readable, take_place
from pipeline.models.save_settings import save_settings
from pipeline.models.slices import adopt, take_slices

if TYPE_CHECKING:
    from pipeline.models.pretrained import Pretrained

Module = TypeVar("Module", bound=nn.Module)


def transformer_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the outermost transformer blocks of a model, in order.

    The blocks are the modules whose class is in `_no_split_modules` of the `transformers` model, except modules that
    contain an embedding: it may be tied to the head, and then belongs to the root. If no block is left, the `layers` of
    the decoder are returned.
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


def untied_embeddings(module: nn.Module) -> list[nn.Embedding]:
    """Return the embeddings whose weights are not shared with another module, such as the head."""
    owners = Counter(id(weight) for part in module.modules() for weight in part.parameters(recurse=False))
    return [part for part in module.modules() if isinstance(part, nn.Embedding) and owners[id(part.weight)] == 1]


def shard(module: Module, config: FSDPConfig, device: torch.device | str, mesh: Mesh | None = None) -> Module:
    """Shard `module` in place, and move it to `device`.

    Args:
        module: the model, equal on all ranks; or with this rank's slices of the weights (`slices.py`), which stay.
        config: dtypes, offloading, and whether gathered weights are freed after the forward pass.
        device: this rank's device.
        mesh: the mesh by which slices were read; None shards over all ranks.

    Returns:
        `module`: its parameters are DTensors, and its gradients are summed over ranks.

    Raises:
        RuntimeError: no process group is initialised.
        ValueError: a type in `config` is unknown.
    """
    mesh = mesh or make_mesh(device)
    # On CPUs null leaves the type of the weights, which need not be the same in all of them.
    computed = config.compute_dtype("", mesh.data.device_type == "cuda")
    policy = MixedPrecisionPolicy(
        param_dtype=torch_dtype(computed, "fsdp.param_dtype") if computed else None,
        reduce_dtype=torch_dtype(config.reduce_dtype, "fsdp.reduce_dtype"),
    )
    options: dict[str, Any] = {
        "mesh": mesh.data,
        "mp_policy": policy,
        "reshard_after_forward": config.reshard_after_forward,
        **({"offload_policy": CPUOffloadPolicy()} if config.offload == "all" else {}),
    }
    slots = take_slices(module, mesh)
    for embedding in untied_embeddings(module):
        # In the root's group it would be gathered as long as the head. Its gradient needs no weights.
        fully_shard(embedding, **options).set_unshard_in_backward(False)
    for block in transformer_blocks(module):  # after the embeddings that some blocks have inside
        fully_shard(block, **options)
    fully_shard(module, **options)
    adopt(slots)
    if config.offload == "all":
        # The parameters stay in host memory.
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                setattr(part, name, buffer.to(device))
    else:
        module.to(device)  # buffers; fully_shard moved the parameters
    # One rank has nothing to sum, and would copy the gradients to divide them by 1.
    for part in module.modules() if mesh.data.size() > 1 else ():
        if isinstance(part, FSDPModule):
            # A plain sum on every backend: gloo has neither AVG nor premultiplied sums.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return module


def clip_grad_norm(
    params: Iterable[nn.Parameter],
    max_norm: float,
    copied: Sequence[nn.Parameter] = (),
    stages: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> float:
    """Scale the gradients down to a global 2-norm of at most `max_norm`; a collective.

    Args:
        params: parameters of this rank's stage, or of the whole model.
        max_norm: largest norm.
        copied: parameters in `params` whose gradients count in another stage.
        stages: ranks with the parameters of the other stages; None without a pipeline.
        device: device on which `stages` communicate.

    Returns the norm before scaling, equal on every rank. If it is not finite, gradients are not changed; the caller
    must then skip the optimiser step.
    """
    with_grad = [parameter for parameter in params if parameter.grad is not None]
    elsewhere = {id(parameter) for parameter in copied}
    squares = 0.0
    for group in by_mesh(parameter for parameter in with_grad if id(parameter) not in elsewhere):
        # Ranks that hold the same weights have the same gradients, which count once.
        norm = nn.utils.get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
        squares += float(norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    if stages is not None:
        total = torch.tensor(squares, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=stages)
        squares = float(total)
    value = math.sqrt(squares)
    if math.isfinite(value):
        for group in by_mesh(with_grad):
            nn.utils.clip_grads_with_norm_(group, max_norm, torch.tensor(value))
    return value


def by_mesh(params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group the parameters by their device mesh, in order, since torch computes norms only over one mesh at a time."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in params:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


class NotSavedError(RuntimeError):
    """Error if a model could not be saved. Every rank raises it."""


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Gather all parameters and persistent buffers, unsharded, in CPU memory; a collective.

    Returns name to tensor on rank 0, and {} on other ranks. A tied parameter appears once, under its first name.
    Adapters are merged, as in `lora.published`.
    """
    return {name: tensor for block in gathered_blocks(model) for name, tensor in block.items()}


def save_hf(
    model: "Pretrained",
    tokenizer: Any,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    ends: Sequence[int] = (),
    replace: bool = False,
    into: bool = False,
) -> None:
    """Save the model and its tokenizer as a Hugging Face folder (safetensors); a collective.

    Rank 0 holds one block of the model and one file at a time. It writes a temporary folder next to `folder` and
    renames it, so an interrupted save never looks like a model. A model with adapters is saved merged, and the adapter
    itself in the subfolder `adapter`.

    Args:
        model: sharded or not.
        tokenizer: the model's tokenizer.
        folder: missing or empty; with `replace` it may hold an older save.
        dtype: dtype of the saved weights; None keeps the model's (with adapters: the base's).
        ends: ids of the end tokens (`ends.py`) for `generation_config.json`; empty keeps the model's.
        replace: whether an older save in `folder` is replaced.
        into: whether `folder` may hold other files, which stay, but no model.

    Raises NotSavedError, on every rank, if rank 0 could not write.
    """
    folder = Path(folder)
    adapter = lora.adapter_state(model) if lora.is_adapted(model) else None
    if adapter is not None:
        dtype = dtype or model.lm.dtype  # merged weights are float32
    rank = dist.get_rank() if dist.is_initialized() else 0
    error: Exception | None = None
    partial = partial_of(folder)
    files = WeightWriter(model.lm, partial)
    try:
        if rank == 0:
            partial.mkdir(parents=True)
    except OSError as problem:
        error = problem
    for block in gathered_blocks(model, dtype):
        try:
            if rank == 0 and error is None:
                files.add({model.hf_name(name): tensor for name, tensor in block.items()})
        except OSError as problem:
            # The other ranks go on to gather.
            error = problem
    try:
        if rank == 0 and error is None:
            # `save_pretrained` deletes files that look like weights of an older save, so weights are written after it.
            save_settings(model.lm, tokenizer, partial, dtype, ends, model.processor)
            files.finish()
            if adapter is not None:
                lora.save(model, adapter, partial / "adapter")
            readable(partial)
            if into:
                join(partial, folder)
            else:
                take_place(partial, folder, replace)
    # The other ranks wait for rank 0 in `_agree`; libraries raise errors of many kinds for a full disk.
    except Exception as problem:  # noqa: BLE001
        error = problem
    if error is not None:
        shutil.rmtree(partial, ignore_errors=True)
    _agree(f"the model could not be saved in {folder}", error)


def try_save(
    model: "Pretrained",
    tokenizer: Any,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    ends: Sequence[int] = (),
    replace: bool = False,
    into: bool = False,
) -> None:
    """Try whether `save_hf` with the same arguments would work: write its files without weights, and delete them.

    A collective. Raises NotSavedError, on every rank, if rank 0 could not write, or `folder` is a file.
    """
    folder, error = Path(folder), None
    partial = partial_of(folder)
    if not dist.is_initialized() or dist.get_rank() == 0:
        missing = [parent for parent in folder.parents if not parent.exists()]
        try:
            if folder.exists() and not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "it is a file")
            partial.mkdir(parents=True)
            save_settings(model.lm, tokenizer, partial, dtype, ends, model.processor)
        except Exception as problem:  # noqa: BLE001 (as above)
            error = problem
        shutil.rmtree(partial, ignore_errors=True)
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()
    _agree(f"the model could not be saved in {folder} at the end", error)


def _agree(sentence: str, error: Exception | None) -> None:
    """Raise NotSavedError, `sentence` with the reason, on every rank if `error` on rank 0 is not None; a collective."""
    reason = None if error is None else (error.strerror if isinstance(error, OSError) else None) or str(error)
    failure = [reason]
    if dist.is_initialized():
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise NotSavedError(f"{sentence}: {failure[0]}") from error


def rescue(save: Callable[[str], None], folders: Sequence[str], reason: str) -> str:
    """Save a model in the first of several folders that can be written, after saving failed; a collective.

    Args:
        save: saves the model in a folder; raises NotSavedError on every rank.
        folders: folders to try, the first choice first; rank 0's are used.
        reason: sentence on the failure so far.

    Returns `reason`, continued by the folder that has the model now, or by further failures.
    """
    choice = [(list(folders), socket.gethostname())]
    dist.broadcast_object_list(choice, src=0)
    for folder in choice[0][0]:
        try:
            save(folder)
        except NotSavedError as error:
            reason += f". Then {error}"
        else:
            return f"{reason}. The model is in {folder} (on {choice[0][1]})"
    return reason
