"""The export of a checkpoint as a Hugging Face folder: weights, config, tokenizer with chat template, model card.

1. The model's class is built on the `meta` device, without memory, to learn its weights' names, which of them are tied,
   and how `transformers` saves its kind. The weights themselves come from the checkpoint, one after the other.
2. `generation_config.json` has the base model's special tokens, all that end a response (`models/ends.py`), and the
   sampling of the run's validation. The base model's own sampling was chosen for another policy.
3. A checkpoint of a model with adapters holds only the adapters. They are merged into the weights of the base, or
   written as they are, in peft's format.
4. The folder is written under a temporary name and renamed, so an interrupted export never looks like a model.
"""

import contextlib
from collections.abc import Collection
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from pipeline.config import Config
from pipeline.config.model import LoraConfig, ModelConfig
from pipeline.config.paths import check_out, named_folder
from pipeline.config.rollout import SamplingConfig
from pipeline.export.card import card
from pipeline.export.choose import Checkpoint
from pipeline.models import adapter
from pipeline.models.checkpoint_reader import CheckpointReader, load_checkpoint
from pipeline.models.ends import Ends, as_stored, find_ends
from pipeline.models.policy import Policy, load_policy
from pipeline.models.precision import torch_dtype
from pipeline.models.pretrained import PREFIX
from pipeline.models.quantised import check_not_quantised
from pipeline.models.save import written_whole
from pipeline.models.save_settings import generation_as_it_is
from pipeline.models.settings import ModelSettings
from pipeline.models.state import is_weight, tensors
from pipeline.models.tokenizer import load_tokenizer
from pipeline.models.value import load_value_model
from pipeline.storage.checkpoints import FOLDER


def export(
    checkpoint: Checkpoint,
    out: Path,
    dtype: str | None = None,
    *,
    critic: bool = False,
    base: str | None = None,
    replace: bool = False,
    alone: bool = False,
) -> Ends | None:
    """Write the model of `checkpoint` into the folder `out`.

    Args:
        checkpoint: the checkpoint.
        out: a new or empty folder, unless `replace` is set.
        dtype: dtype of the weights; None keeps the dtype of training.
        critic: true to write the critic, as a model for token classification with one label: the value of the text so
            far.
        base: the model from which the run started, if it has moved since.
        replace: true to replace the folder `out`.
        alone: true to write only the policy's adapter, without the base.

    Returns:
        The tokens that end responses of the model; None for a critic.

    Raises:
        ValueError: the checkpoint, the base model or `out` cannot be used.
        OSError: the folder cannot be written.
    """
    # A progress bar for a second's writing would interrupt the lines that the commands print.
    disable_progress_bar()
    config = checkpoint.config()
    model = _base_model(config, checkpoint.run_dir, base, critic)
    if not replace:
        # Checkpoints are deleted with all files in their folders.
        inside = checkpoint.path.parent.name == FOLDER
        checkpoints = checkpoint.path.parent if inside else checkpoint.path
        check_out(out, (model.path, model.tokenizer_path, str(checkpoints)))
    tokenizer = load_tokenizer(model, needs_chat_template=False)
    ends = None if critic else find_ends(model, tokenizer, config.data.apply_chat_template_kwargs)
    lora, as_type = config.model.lora, torch_dtype(dtype, "--dtype") if dtype else None
    lm = _without_weights(model, critic)
    kept = _buffers(lm, critic)
    state = read_weights(checkpoint.path, "critic" if critic else "actor", None if lora.rank else as_type, kept)
    if alone:
        _write_adapter(out, lora, model.path, state, as_type, card(checkpoint, config, adapter=True))
        return ends
    if lora.rank:
        load = load_value_model if critic else load_policy
        whole = load(replace_fields(model, dtype=config.model.dtype))
        state = merged(lora, dict(whole.state_dict()), state, as_type, kept)
    lm.to(next(tensor.dtype for name, tensor in state.items() if name not in kept))
    if ends is None:
        named = _critic_names(state, lm)
    else:
        named = {Policy.hf_name(name): tensor for name, tensor in state.items()}
        lm.generation_config = _generation_config(model, ends, config.rollout.val_kwargs)
    weights = _saved_weights(lm, named, checkpoint.path, config.actor.strategy == "megatron" and not critic)
    with written_whole(out, replace) as partial:
        with generation_as_it_is(lm, partial):
            lm.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(partial)
        if not critic:
            ModelSettings.of(config, checkpoint.iteration).save(partial)
        (partial / "README.md").write_text(card(checkpoint, config, critic), encoding="utf-8")
    return ends


def _write_adapter(
    out: Path, lora: LoraConfig, base: str | None, state: dict[str, Tensor], dtype: torch.dtype | None, text: str
) -> None:
    """Write the adapter of a policy into `out`, in peft's format.

    Args:
        out: the folder.
        lora: settings of the adapter.
        base: path or name of the base model.
        state: the adapter's tensors, by their names in the module.
        dtype: dtype of the written tensors; None keeps it.
        text: the model card.
    """
    if not lora.rank:
        raise ValueError("--adapter needs an adapter, but the run trained all weights (model.lora.rank=0)")
    named = {
        adapter.peft_name(Policy.hf_name(name)): tensor.to(dtype or tensor.dtype) for name, tensor in state.items()
    }
    with written_whole(out) as partial:
        adapter.write(partial, adapter.settings_of(lora, base, named), named)
        (partial / "README.md").write_text(text, encoding="utf-8")


def merged(
    lora: LoraConfig,
    base: dict[str, Tensor],
    state: dict[str, Tensor],
    dtype: torch.dtype | None,
    kept: Collection[str] = (),
) -> dict[str, Tensor]:
    """Merge a learner's adapter into the base; returns the full weights by their names in the module.

    Args:
        lora: settings of the adapter.
        base: the base's weights, by their names in the module.
        state: the trained weights: the adapter, and weights that were trained without one.
        dtype: dtype of the result; None keeps the dtypes of the base.
        kept: names of the tensors that keep their dtype in any case.

    Raises:
        ValueError: the adapter belongs to another model.
    """
    for name, a in state.items():
        stem, found, _ = name.partition(f".lora_A.{adapter.NAME}")
        weight, b = base.get(f"{stem}.weight"), state.get(name.replace(".lora_A.", ".lora_B."))
        if not found:
            if ".lora_" not in name:
                base[name] = a
            continue
        if weight is None or b is None or weight.shape != (len(b), a.shape[1]):
            raise ValueError(
                f"the checkpoint's adapter of {stem} does not fit the base; name the right one with --base"
            )
        base[f"{stem}.weight"] = torch.addmm(weight.float(), b, a, alpha=lora.alpha / lora.rank).to(weight.dtype)
    return {name: tensor.to(dtype if dtype and name not in kept else tensor.dtype) for name, tensor in base.items()}


def read_weights(
    folder: Path, learner: str, dtype: torch.dtype | None = None, kept: Collection[str] = ()
) -> dict[str, Tensor]:
    """Read the full weights of a learner by their names in the module, saved by any number of ranks.

    The weights are read one by one into the result, so no further memory is needed.

    Args:
        folder: folder of the checkpoint.
        learner: `actor` or `critic`.
        dtype: dtype of the result; None keeps all dtypes.
        kept: names of the tensors that keep their dtype in any case.

    Raises:
        ValueError: the checkpoint is damaged or has no such learner.
        OSError: a file cannot be read.
    """
    prefix = f"{learner}.model."
    state: dict[str, Tensor] = {}
    for name, stored in CheckpointReader(folder).read_metadata().state_dict_metadata.items():
        if name.startswith(prefix) and isinstance(stored, TensorStorageMetadata):
            own = not dtype or name.removeprefix(prefix) in kept
            state[name] = torch.empty(stored.size, dtype=stored.properties.dtype if own else dtype)
    if not state:
        raise ValueError(f"{folder} holds no weights of the {learner}; the run had none, or another one is meant")
    load_checkpoint(state, folder, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def _base_model(config: Config, run_dir: Path, base: str | None, critic: bool) -> ModelConfig:
    """Return the model from which config and tokenizer are taken: `base`, else the one from which the run started, else
    the one that the run saved."""
    path = base or (config.critic.path if critic else None) or config.model.path or ""
    try:
        folder = named_folder(path, "--base" if base else "model.path")
    except ValueError as error:
        folder = run_dir / "model"
        # That model contains the adapter already.
        if base or critic or config.model.lora.rank or not (folder / "config.json").is_file():
            raise ValueError(f"{error}; name the model that the run started from with --base") from error
    path = str(folder or path)
    check_not_quantised(path, "--base" if base else "model.path")
    tokenizer = config.model.tokenizer_path
    try:
        named_folder(tokenizer or path)
    except ValueError:
        # The tokenizer's folder is gone, but the model has a tokenizer too.
        tokenizer = None
    if critic and not tokenizer and not base:
        # The critic reads the policy's tokens.
        tokenizer = config.model.path
    return ModelConfig(path=path, tokenizer_path=tokenizer, trust_remote_code=config.model.trust_remote_code)


def _hf_config(model: ModelConfig) -> Any:
    assert model.path is not None
    with contextlib.suppress(OSError):
        return AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    raise ValueError(f"{model.path} has no config of a model that transformers knows; name the model with --base")


def _without_weights(model: ModelConfig, critic: bool) -> Any:
    """Build the language model, or for a critic the token classifier, on the `meta` device, without weights."""
    config = _hf_config(model)
    auto: Any = AutoModelForCausalLM
    if critic:
        auto = AutoModelForTokenClassification
        config.num_labels = 1
    try:
        with torch.device("meta"):
            return auto.from_config(config, trust_remote_code=model.trust_remote_code)
    except ValueError as error:
        raise ValueError(f"transformers has no {auto.__name__} for {config.model_type} ({error})") from error


def _buffers(lm: Any, critic: bool) -> set[str]:
    """Return the names, in the learner's module, of the buffers that `lm` saves; an export keeps their dtype."""
    names = [name for name, tensor in tensors(lm) if not is_weight(tensor)]
    if critic:
        return {name.replace(lm.base_model_prefix, "decoder", 1) for name in names}
    return {PREFIX + name for name in names}


def _critic_names(state: dict[str, Tensor], lm: Any) -> dict[str, Tensor]:
    """Rename a critic's weights (`decoder.*` and its head) to the names of the token classifier `lm`."""
    decoder = f"{lm.base_model_prefix}."
    heads = [name.rpartition(".")[0] for name, _ in lm.named_parameters() if not name.startswith(decoder)]
    head = min(heads, default="score")
    named = {}
    for name, tensor in state.items():
        part, _, rest = name.partition(".")
        named[decoder + rest if part == "decoder" else f"{head}.{rest}"] = tensor
    return named


def _saved_weights(lm: Any, named: dict[str, Tensor], source: Path, as_files: bool = False) -> dict[str, Tensor]:
    """Select the weights that `lm` saves; a tied weight is saved under its first name only.

    Args:
        lm: the model, without weights.
        named: the weights by their names in `lm`.
        source: the checkpoint, for error messages.
        as_files: whether the weights have the names of files of the model, as Megatron's have, and not of `lm`.

    Raises:
        ValueError: a weight is missing or has another shape.
    """
    expected = dict(tensors(lm))
    if as_files:
        from transformers.core_model_loading import revert_weight_conversion

        expected = dict(revert_weight_conversion(lm, expected))
    for name, tensor in expected.items():
        shape = list(named[name].shape) if name in named else None
        if shape != list(tensor.shape):
            problem = "is missing" if shape is None else f"has the shape {shape}"
            raise ValueError(
                f"{source}: {name} {problem}, but the base model's config expects {list(tensor.shape)}; the checkpoint "
                "is of another model (--base names the model that the run started from)"
            )
    return {name: named[name] for name in expected}


def _generation_config(model: ModelConfig, ends: Ends, sampling: SamplingConfig) -> GenerationConfig:
    """Make the generation config: special tokens of the base model, tokens that end responses, validation's
    sampling."""
    assert model.path is not None
    try:
        base = GenerationConfig.from_pretrained(model.path)
    except OSError:
        base = GenerationConfig.from_model_config(_hf_config(model))
    options: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        options = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
        options["top_k"] = max(sampling.top_k, 0)
    eos = as_stored(ends.ids) if ends.ids else None
    return GenerationConfig(bos_token_id=base.bos_token_id, eos_token_id=eos, pad_token_id=base.pad_token_id, **options)
