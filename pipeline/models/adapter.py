"""Folders of LoRA adapters in peft's format: `adapter_config.json` and `adapter_model.safetensors`.

peft's `PeftModel.from_pretrained` and vLLM's `LoRARequest` read such folders. The checks here do not load torch.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.model import ALL_LINEAR, LoraConfig
from pipeline.models.weight_files import tensor_shapes

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, NAME = "base_model.model.", "default"
"""peft's prefix of weight names in an adapter's file, and peft's default name of an adapter."""
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "lora_bias": (False,),
    "use_rslora": (False,),
    "use_dora": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
}
"""Entry of `adapter_config.json` to its allowed values (null is also allowed). With these an adapter is plain LoRA,
W + alpha / r * B A."""
CHANGES_BASE = ("pissa", "corda", "olora", "mica", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` for methods that changed W at the start of training; peft repeats the change when
it loads the adapter."""


def peft_name(name: str) -> str:
    """Return the name in an adapter's file for the parameter `name` of a model with an adapter."""
    return PREFIX + name.replace(f".{NAME}.", ".")


def module_name(name: str) -> str:
    """Return the name of the layer that the tensor `name` of an adapter's file belongs to."""
    return name.removeprefix(PREFIX).partition(".lora_")[0]


def settings_of(config: LoraConfig, base: str | None, names: Iterable[str]) -> dict[str, Any]:
    """Return the content of `adapter_config.json`.

    Args:
        config: rank, alpha and targets of the adapter.
        base: the base model's folder or hub name.
        names: names of the tensors in the file. A layer in it without low-rank matrices, such as a new head, counts as
            trained whole (`modules_to_save`).
    """
    names = list(names)
    whole = sorted({module_name(name).rpartition(".")[0].rpartition(".")[2] for name in names if ".lora_" not in name})
    targets = config.target_modules
    if targets == ALL_LINEAR:
        # Other readers take other layers for all.
        targets = sorted({module_name(name).rpartition(".")[2] for name in names if ".lora_" in name})
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if whole else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "modules_to_save": whole or None,
        "inference_mode": True,
    }


def write(folder: Path, settings: Mapping[str, Any], state: Mapping[str, "Tensor"]) -> None:
    """Write the folder of an adapter.

    Args:
        folder: created if it is missing.
        settings: content of `adapter_config.json`.
        state: name in the file to tensor.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / WEIGHTS, {"format": "pt"})


def problems(
    config: LoraConfig, matrices: Mapping[str, tuple[int, int]], base: str | None, key: str = "model.path"
) -> Iterator[str]:
    """Yield a sentence for each reason why `model.lora` cannot be used with a base model.

    Args:
        config: `model.lora`.
        matrices: name to shape (outputs, inputs) of the base model's linear layers; empty if they are not known.
        base: path of the base model, for the sentences.
        key: setting that has this path, for the sentences.
    """
    if not config.rank or not config.well_formed:
        return
    if matrices and (lost := config.unmatched(list(matrices))):
        last = sorted({name.rpartition(".")[2] for name in matrices})
        yield (
            f"model.lora.target_modules: {', '.join(lost)} matches no linear layer inside of {key}={base}; it has "
            f"{', '.join(last)}, and its head cannot have an adapter"
        )
    sides = [side for name in config.chosen(list(matrices)) for side in matrices[name]]
    if sides and config.rank > max(sides):
        yield (
            f"model.lora.rank={config.rank} is more than the {max(sides)} rows or columns of any linear layer of "
            f"{key}={base}; choose a small one, such as 16"
        )
    if config.path:
        yield from _adapter_problems(config, matrices, base)


def _adapter_problems(config: LoraConfig, matrices: Mapping[str, tuple[int, int]], base: str | None) -> Iterator[str]:
    folder, key = Path(config.path or ""), f"model.lora.path={config.path}"
    missing = [name for name in (SETTINGS, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        yield f"{key} holds no {' and no '.join(missing)}; give the folder of an adapter that peft has saved"
        return
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except ValueError as error:
        yield f"{key}: {SETTINGS} is not valid JSON: {error}"
        return
    if not isinstance(settings, dict) or not {"r", "lora_alpha"} <= settings.keys():
        yield f"{key}: {SETTINGS} has no r and lora_alpha; give the folder of an adapter that peft has saved"
        return
    for name, values in PLAIN.items():
        if settings.get(name) not in (None, *values):
            yield f"{key} is of a kind that is not trained here: its {name} is {settings[name]}"
    if str(settings.get("init_lora_weights")).lower().startswith(CHANGES_BASE):
        yield (
            f"{key} belongs to a base whose weights it changed at its start (init_lora_weights is "
            f"{settings['init_lora_weights']}); merge it with peft, or convert it to plain LoRA as peft documents"
        )
    for name, entry, ours in (("rank", "r", config.rank), ("alpha", "lora_alpha", config.alpha)):
        theirs = settings.get(entry)
        if theirs != ours:
            yield f"{key} has {entry}={theirs} and model.lora.{name}={ours:g}; set model.lora.{name}={theirs}"
    if not matrices:
        return
    shapes = tensor_shapes(folder / WEIGHTS)
    if whole := sorted(module_name(name) for name in shapes if ".lora_" not in name):
        yield f"{key} holds more than low-rank matrices: {whole[0]}; only linear layers inside are adapted here"
        return
    for name, shape in sorted(shapes.items()):
        module = module_name(name)
        side = 0 if ".lora_B." in name else 1
        known = matrices.get(module)
        if known is None or known[side] != shape[side]:
            has = f"has {module} with {known[side]} but the adapter has {shape[side]}" if known else f"has no {module}"
            yield f"{key} is an adapter of another base: model.path={base} {has}; name the model it was trained on"
            return
    layers, chosen = {module_name(name) for name in shapes}, set(config.chosen(list(matrices)))
    if chosen and layers != chosen:
        last = sorted({name.rpartition(".")[2] for name in layers})
        same = set(replace(config, target_modules=last).chosen(list(matrices))) == layers
        remedy = f"[{','.join(last)}]" if same else "a list of its layers"
        yield (
            f"{key} has {len(layers)} layers and model.lora.target_modules={config.target_modules} chooses "
            f"{len(chosen)}, {min(layers ^ chosen)} on one side only; set it to {remedy}"
        )


def count(config: LoraConfig, matrices: Mapping[str, tuple[int, int]]) -> int:
    """Return the number of parameters of an adapter.

    Args:
        config: `model.lora`.
        matrices: name to shape (outputs, inputs) of the base model's linear layers.
    """
    return config.rank * sum(sum(matrices[name]) for name in config.chosen(list(matrices)))
