"""What all models made of `transformers` models share: loading with plain errors, and their parameters' own names."""

from typing import Any

from torch import nn

from pipeline.config.model import ModelConfig
from pipeline.config.paths import model_folder
from pipeline.models.fsdp import torch_dtype
from pipeline.prompts.prompt_file import reason

PREFIX = "lm."


class Pretrained(nn.Module):
    """A module around the whole `transformers` model `lm`, which `save_hf` can write as a Hugging Face folder."""

    lm: Any

    @staticmethod
    def hf_name(name: str) -> str:
        """The model's own name of a parameter of this wrapper: the name in a Hugging Face checkpoint."""
        return name.removeprefix(PREFIX)


def load_pretrained(auto: Any, config: ModelConfig, key: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The model of `config.path` on the CPU, ready to train, and what `transformers` says about the loading.

    Args:
        auto: class of `transformers` with `from_pretrained`, such as `AutoModelForCausalLM`.
        config: path, type, attention and checkpointing.
        key: the configuration key that the path came from, for errors.
        options: arguments of `from_pretrained`, over those that follow from `config`.

    Raises:
        ValueError: no path, an incomplete model folder, or one that `transformers` cannot load.
    """
    if not config.path:
        raise ValueError(f"{key} is not set; give a Hugging Face model folder or hub name.")
    folder = model_folder(config.path, key)
    if folder and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ValueError(f"{key}={folder} has no weights (*.safetensors); give a complete model folder.")
    arguments = {
        "dtype": torch_dtype(config.dtype, "model.dtype"),
        "attn_implementation": config.attn_implementation,
        "trust_remote_code": config.trust_remote_code,
        **options,
    }
    try:
        model, report = auto.from_pretrained(folder or config.path, output_loading_info=True, **arguments)
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}={config.path} cannot be loaded: {reason(error)}") from error
    if config.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train(), report


def check_complete(missing: set[str], config: ModelConfig, key: str) -> None:
    """Raises ValueError where weights are missing in the checkpoint."""
    if missing:
        raise ValueError(
            f"{key}={config.path} lacks {len(missing)} weights, the first {min(missing)}, which would start at "
            "random; give a complete checkpoint."
        )


def without_dropout(lm: Any) -> None:
    """Set every dropout of `lm` to 0."""
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
