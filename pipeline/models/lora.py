"""LoRA: a frozen base with low-rank adapters (Hu et al. 2021), which peft puts into the linear layers.

    y = W x + alpha / r * B A x        W [out, in] frozen, A [r, in] random and B [out, r] zero at the start

1. Adapters are injected into a model that is not sharded yet, and are equal on all ranks. FSDP then shards base and
   adapter together: a rank holds the same rows of W and B.
2. Adapters, and heads that are trained with them, are float32 for any dtype of the base: they are small, and the small
   steps of the optimiser must not be lost to rounding.
3. `published` yields the weights for engines and saved models: merged, under the names that the model has without
   adapters, or only the adapter's. Each rank merges its own rows.
4. The head has no adapter: only its weights are read, its module is never called, and in many models it is tied to the
   embedding.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pipeline.config.model import LoraConfig, ModelConfig
from pipeline.errors import short_reason
from pipeline.models import adapter
from pipeline.models.state import tensors
from pipeline.upstream.peft import switched_off, targets_as_named

if TYPE_CHECKING:
    from pipeline.models.pretrained import Pretrained

BASE = "base_layer."
"""Part that peft inserts into the names of the weights W to which an adapter belongs."""


def policy_class(config: ModelConfig) -> str:
    """Return the name of the class of `transformers` that makes the policy of `config`."""
    return "AutoModelForCausalLM" if config.vision == "none" else "AutoModelForImageTextToText"


def inject(lm: Any, config: LoraConfig, key: str = "model.path", train_head: bool = False) -> None:
    """Freeze `lm` and put adapters into its linear layers, in place. Does nothing if `config.rank` is 0.

    Args:
        lm: a `transformers` model, not sharded.
        config: `model.lora`.
        key: the configuration key of the model's path, for errors.
        train_head: whether weights outside of the base model, such as a new head, are trained too.

    Raises ValueError for targets that match no layer, and for a starting adapter (`config.path`) that does not fit the
    model.
    """
    if not config.rank:
        return
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    inside = f"{lm.base_model_prefix}."
    # A tower of images has none: only the decoder's are proven to reach an engine.
    known = {*(lm.get_decoder() if hasattr(lm.base_model, "get_image_features") else lm).modules()}
    names = [
        name
        for name, part in lm.named_modules()
        if isinstance(part, nn.Linear) and name.startswith(inside) and part in known
    ]
    if lost := config.unmatched(names):
        last = sorted({name.rpartition(".")[2] for name in names})
        raise ValueError(
            f"model.lora.target_modules: {', '.join(lost)} matches no linear layer inside of the {type(lm).__name__} "
            f"of {key}; it has {', '.join(last) or 'none'}, and its head cannot have an adapter"
        )
    # Whole names: peft would also look for the targets outside of the base model.
    settings = PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules=config.chosen(names), bias="none")  # type: ignore[arg-type]
    # `published` could not merge an adapter of a single tensor that holds all experts.
    with torch.random.fork_rng(devices=[]), targets_as_named():
        torch.manual_seed(0)
        try:
            inject_adapter_in_model(settings, lm)
        except ValueError as error:
            # Families such as Mamba use the weights of some layers past their modules.
            raise ValueError(f"model.lora.target_modules does not fit {key}: {short_reason(error)}") from error
    for name, parameter in lm.named_parameters():
        if train_head and not name.startswith(inside):
            parameter.requires_grad_(True)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if config.path:
        _start_from(lm, Path(config.path), key)


@dataclass(frozen=True)
class Coverage:
    """The part of a model's weights that gets adapters."""

    text: str
    """Description of the part, for a sentence."""
    complete: bool
    """True if every matrix that `model.lora.target_modules` names gets an adapter."""


def coverage(config: ModelConfig, key: str = "model.path", auto: str | None = None) -> Coverage | None:
    """Find the part of a model that gets adapters, without loading weights; None if the LoRA rank is 0.

    Args:
        config: settings of the model: path and adapters.
        key: the configuration key of the path.
        auto: name of the class of `transformers` that makes the model; None for the policy's.

    Raises ValueError as `inject` does, and for a model that `transformers` cannot make.
    """
    if not config.lora.rank:
        return None
    import transformers

    try:
        settings = transformers.AutoConfig.from_pretrained(
            config.path or "", trust_remote_code=config.trust_remote_code
        )
        with torch.device("meta"):
            lm = getattr(transformers, auto or policy_class(config)).from_config(
                settings, trust_remote_code=config.trust_remote_code
            )
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}={config.path} cannot be loaded: {short_reason(error)}") from error
    inject(lm, replace(config.lora, path=None), key)
    tables = {id(part.weight) for part in lm.modules() if isinstance(part, nn.Embedding)}
    sizes = {
        name.removesuffix(".weight"): parameter.numel()
        for name, parameter in lm.named_parameters()
        if parameter.ndim > 1 and ".lora_" not in name
        if name.startswith(f"{lm.base_model_prefix}.") and id(parameter) not in tables
    }
    suffix = f".{BASE.removesuffix('.')}"
    have = [name for name in sizes if name.endswith(suffix)]
    total = sum(sizes.values())
    text = f"on {len(have)} linear layers with {sum(sizes[name] for name in have) / total:.1%} of the weights inside"
    named = config.lora.chosen([name for name in sizes if name not in have])
    kinds: Counter[str] = Counter()
    for name in named:
        # Without the number of the layer.
        kinds[re.split(r"\.\d+\.", name)[-1]] += sizes[name]
    if kinds:
        shares = ", ".join(f"{kind} ({count / total:.1%})" for kind, count in kinds.most_common())
        text += (
            f" of {key}={config.path}; model.lora.target_modules={config.lora.target_modules} covers less than "
            f"expected: these are not linear layers in transformers, so they get no adapter: {shares}"
        )
    return Coverage(text, not kinds)


@torch.no_grad()
def _start_from(lm: Any, folder: Path, key: str) -> None:
    from safetensors.torch import load_file

    found = load_file(folder / adapter.WEIGHTS)
    ours = {adapter.peft_name(name): parameter for name, parameter in lm.named_parameters() if ".lora_" in name}
    for name in sorted(found.keys() | ours.keys()):
        if name not in found or name not in ours or found[name].shape != ours[name].shape:
            shapes = [tuple(state[name].shape) if name in state else "none" for state in (found, ours)]
            raise ValueError(
                f"model.lora.path={folder} does not fit {key} and model.lora.target_modules: {name} has the shape "
                f"{shapes[0]} there and {shapes[1]} here; name the base and the targets that it was trained with"
            )
        ours[name].copy_(found[name])


def is_adapted(model: nn.Module) -> bool:
    """Return whether the model has adapters."""
    return any(".lora_" in name for name, _ in model.named_parameters())


def published(model: nn.Module, adapter_alone: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights for engines and saved models, one by one; with adapters a collective.

    Args:
        model: sharded or not, with or without adapters.
        adapter_alone: whether to yield only the tensors of the adapter; else these are merged into the base.

    Yields:
        `(name, tensor)` in the order of `state.tensors`: parameters and buffers. Merged weights are new float32
        tensors, sharded as the base; all others are the model's own tensors.
    """
    _reshard(model)
    for name, tensor in tensors(model):
        if ".lora_" in name or adapter_alone:
            if ".lora_" in name and adapter_alone:
                yield name, tensor
            continue
        stem, inside, last = name.rpartition(BASE)
        merges = inside and last == "weight"
        merged = _merged(model.get_submodule(stem.removesuffix("."))) if merges else None
        yield stem + last, tensor if merged is None else nn.Parameter(merged, requires_grad=False)


@torch.no_grad()
def _merged(layer: Any) -> Tensor:
    """[out, in] float32, W + alpha / r * B A of a layer with an adapter; each rank computes its rows."""
    weight = layer.base_layer.weight
    a: Any = layer.lora_A[adapter.NAME].weight.detach()  # [r, in]
    b: Any = layer.lora_B[adapter.NAME].weight.detach()  # [out, r]
    scale = layer.scaling[adapter.NAME]
    if not isinstance(weight, DTensor):
        return torch.addmm(weight.detach().float(), b, a, alpha=scale)
    if weight.placements != b.placements or any(place.is_shard() and not place.is_shard(0) for place in b.placements):
        raise ValueError(f"a base sharded as {weight.placements} and an adapter as {b.placements} cannot be merged")
    local = torch.addmm(weight.to_local().detach().float(), b.to_local(), a.full_tensor(), alpha=scale)
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _reshard(model: nn.Module) -> None:
    """Free gathered weights, which a forward pass without a backward pass leaves behind in the dtype of computation."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off within the block, so that the model computes as its base."""
    with switched_off(part for part in model.modules() if hasattr(part, "lora_A")):
        yield


def adapter_state(model: "Pretrained") -> dict[str, Tensor]:
    """Gather the trained tensors, unsharded, in CPU memory: name in an adapter's file to tensor. A collective."""
    _reshard(model)
    state = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            state[adapter.peft_name(model.hf_name(name))] = whole.detach().to("cpu", copy=True)
    return state


def save(model: "Pretrained", state: dict[str, Tensor], folder: Path) -> None:
    """Write an adapter as a folder that peft and vLLM read.

    Args:
        model: the model with the adapter.
        state: result of `adapter_state(model)`.
        folder: created if it is missing.
    """
    ours = model.lm.peft_config[adapter.NAME]
    layers = sorted({adapter.module_name(name) for name in state if ".lora_" in name})
    plain = [name for name, part in model.lm.named_modules() if isinstance(part, nn.Linear)]
    config = LoraConfig(rank=ours.r, alpha=ours.lora_alpha)
    # Targets are the last parts of layer names; whole names if a layer without an adapter has the same last part.
    if {name.rpartition(".")[2] for name in layers} & {name.rpartition(".")[2] for name in plain}:
        config.target_modules = layers
    adapter.write(folder, adapter.settings_of(config, model.lm.name_or_path, state), state)
