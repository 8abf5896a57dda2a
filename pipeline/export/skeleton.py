"""Models without weights: what `transformers` calls the weights of a policy or a critic, and how it saves them."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, GenerationConfig

from pipeline.config import Config
from pipeline.train.config import ModelConfig
from pipeline.train.policy import Policy


def policy_skeleton(model: ModelConfig, dtype: torch.dtype) -> Any:
    """The causal language model of `model.path`, on the `meta` device."""
    config = _config(model)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=model.trust_remote_code)


def critic_skeleton(model: ModelConfig, dtype: torch.dtype) -> Any:
    """A model of `model.path` for token classification with one label, on the `meta` device.

    Raises:
        ValueError: `transformers` has no such class for this kind of model.
    """
    config = _config(model)
    config.num_labels = 1
    try:
        with torch.device("meta"):
            return AutoModelForTokenClassification.from_config(
                config, dtype=dtype, trust_remote_code=model.trust_remote_code
            )
    except ValueError as error:
        raise ValueError(
            f"transformers has no token classification for {config.model_type}, so its critic cannot be exported"
        ) from error


def policy_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a trained policy under the names of its language model."""
    return {Policy.hf_name(name): tensor for name, tensor in state.items()}


def critic_names(state: dict[str, Tensor], skeleton: Any) -> dict[str, Tensor]:
    """Weights of a trained critic under the names of its skeleton: decoder and classifier."""
    decoder, named = f"{skeleton.base_model_prefix}.", {}
    heads = {name.rpartition(".")[0] for name, _ in skeleton.named_parameters() if not name.startswith(decoder)}
    for name, tensor in state.items():
        part, _, rest = name.partition(".")
        named[decoder + rest if part == "decoder" else f"{min(heads, default='score')}.{rest}"] = tensor
    return named


def fitted(skeleton: nn.Module, named: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Those of the weights that `skeleton` saves: a tied weight under its first name alone.

    Raises:
        ValueError: a weight is missing or has another shape.
    """
    persistent = skeleton.state_dict().keys()
    wanted = dict(skeleton.named_parameters())
    wanted |= {name: buffer for name, buffer in skeleton.named_buffers() if name in persistent}  # type: ignore[misc]
    for name, expected in wanted.items():
        found = named.get(name)
        if found is None or found.shape != expected.shape:
            what = "is missing" if found is None else f"has the shape {list(found.shape)}"
            raise ValueError(
                f"{where}: {name} {what}, and the base model's config wants {list(expected.shape)}; the checkpoint is "
                "of another model than the config (--base names the model that the run began with)"
            )
    return {name: named[name] for name in wanted}


def generation_config(model: ModelConfig, config: Config) -> GenerationConfig:
    """The special tokens of the base model, and the sampling with which the run validated."""
    assert model.path is not None
    try:
        own = GenerationConfig.from_pretrained(model.path)
    except OSError:
        own = GenerationConfig.from_model_config(_config(model))
    sampling = config.rollout.val_kwargs
    options: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        options = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
        options["top_k"] = max(sampling.top_k, 0)
    return GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id, **options
    )


def base_config(config: Config, run_dir: Path, base: str | None, critic: bool) -> ModelConfig:
    """Where the config and the tokenizer of the exported model come from.

    That is `base`, else the model that the run began with, else, if that one has gone, the model the run left.

    Raises:
        ValueError: a local folder is named that is not there.
    """
    model = config.model
    started = (config.critic.path if critic else None) or model.path or ""
    if base is not None:
        if Path(base).is_absolute() and not Path(base).is_dir():
            raise ValueError(f"--base {base} is not there; name the model that the run began with")
        path: str = base
    elif Path(started).is_absolute() and not Path(started).is_dir():
        path = str(run_dir / "model")
        if critic or not Path(path, "config.json").is_file():
            raise ValueError(f"the model that the run began with, {started}, is gone; name its new place with --base")
    else:
        path = started
    tokenizer = model.tokenizer_path
    if tokenizer and Path(tokenizer).is_absolute() and not Path(tokenizer).is_dir():
        tokenizer = None
    if critic and not tokenizer:
        # The critic reads the policy's tokens.
        tokenizer = None if base is not None else model.path
    return ModelConfig(path=path, tokenizer_path=tokenizer, trust_remote_code=model.trust_remote_code)


def _config(model: ModelConfig) -> Any:
    assert model.path is not None
    with contextlib.suppress(OSError):
        return AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    raise ValueError(f"{model.path} has no config of a model that transformers knows; name the model with --base")
