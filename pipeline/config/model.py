"""Settings of the trained model (`model.*`)."""

import importlib.util
import re
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.bounds import setting

ALL_LINEAR = "all-linear"
LARGEST_ALONE = 512
"""Maximum adapter rank that vLLM supports."""


@dataclass
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021): the base model is frozen, and each chosen weight W becomes W + alpha / rank *
    B A with two small trained matrices."""

    rank: int = setting(0, at_least=0)
    """Rank of the adapters: number of rows of A and columns of B. 0 trains all weights without adapters."""

    alpha: float = setting(16.0, above=0)
    """Scale of the adapters: B A is multiplied by `alpha / rank`."""

    target_modules: Any = ALL_LINEAR
    """Linear layers that get an adapter: `all-linear` (all except the head), a list of last parts of layer names such
    as `[q_proj,v_proj]`, or a regular expression that matches a whole layer name."""

    weight_sync: str = setting("merged", choices=("merged", "adapter"))
    """Weights that engines get after each update. `merged`: all weights, with the adapter added. `adapter`: only the
    adapter, which is small, but engines then read the base model from `model.path` and generate more slowly."""

    path: str | None = setting(None, path="model")
    """Folder of an adapter in peft's format to start from. Null starts with B = 0, so the policy equals the base
    model."""

    @property
    def alone(self) -> bool:
        """True if engines get only the adapter, without the weights of the base model."""
        return self.rank > 0 and self.weight_sync == "adapter"

    @property
    def well_formed(self) -> bool:
        """True if `target_modules` is a valid regular expression or a list of names that is not empty."""
        targets = self.target_modules
        if isinstance(targets, str):
            try:
                return bool(targets and re.compile(targets))
            except re.error:
                return False
        return isinstance(targets, list) and bool(targets) and all(isinstance(name, str) for name in targets)

    def problems(self) -> dict[str, object]:
        """Return sentences on settings that exclude each other, each with a true value if it applies."""
        return {
            "{model.lora.path} does nothing with {model.lora.rank}; set model.lora.rank to the adapter's rank": (
                self.path and not self.rank
            ),
            "{model.lora.weight_sync} does nothing with {model.lora.rank}; set model.lora.rank above 0": (
                self.weight_sync == "adapter" and not self.rank
            ),
            f"{{model.lora.rank}} is above {LARGEST_ALONE}, the limit of an engine's adapter; set "
            "model.lora.weight_sync=merged": self.alone and self.rank > LARGEST_ALONE,
            "{model.lora.rank} needs the Python package peft on every node: pip install peft": (
                self.rank and importlib.util.find_spec("peft") is None
            ),
            "{model.lora.target_modules} must be all-linear, a list of names or a regular expression": (
                not self.well_formed
            ),
        }

    def unmatched(self, names: list[str]) -> list[str]:
        """Return the entries of `target_modules` that match none of the layer names `names`."""
        targets = self.target_modules
        entries = [targets] if isinstance(targets, str) else list(targets)
        return [str(entry) for entry in entries if not any(_matches(entry, targets, name) for name in names)]

    def chosen(self, names: list[str]) -> list[str]:
        """Return the names of the layers that get an adapter, out of `names`, the names of all linear layers."""
        targets = self.target_modules
        entries = [targets] if isinstance(targets, str) else list(targets)
        return [name for name in names if any(_matches(entry, targets, name) for entry in entries)]


def _matches(entry: Any, targets: Any, name: str) -> bool:
    """Return True if `entry` of `targets` matches the layer name, as in peft.

    If `targets` is text, it is a regular expression for the whole name; the entry of a list must equal the name or its
    last dotted parts.
    """
    if isinstance(targets, str):
        return targets == ALL_LINEAR or re.fullmatch(targets, name) is not None
    return name == entry or name.endswith(f".{entry}")


@dataclass
class ModelConfig:
    """The trained language model."""

    path: str | None = setting(None, path="model")
    """Hugging Face model: a local folder or a hub name."""

    tokenizer_path: str | None = setting(None, path="model")
    """Tokenizer: a local folder or a hub name. Null takes `path`."""

    vision: str = setting("none", choices=("none", "frozen", "trained"))
    """Images in prompts (`data.image_key`). `none`: only text. `frozen`: vision tower and projector stay as they are.
    `trained`: both are trained with the decoder."""

    min_pixels: int | None = setting(None, at_least=1)
    """Number of pixels up to which smaller images are scaled, in engine and trainer. Null: the processor's."""

    max_pixels: int | None = setting(None, at_least=1)
    """Number of pixels down to which larger images are scaled, in engine and trainer. Null: the processor's."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Read that code first."""

    dtype: str = setting("float32", choices=("float32", "bfloat16"))
    """Type of the trained weights and their gradients. With `bfloat16`, the optimiser state holds the lower 16 bits of
    the float32 weights, so small steps are not lost; weights, gradients and state then take 14 bytes per weight instead
    of 16."""

    attn_implementation: str = "sdpa"
    """Attention implementation of the trained model, by its name in `transformers`."""

    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. Takes less memory and more time."""

    activation_offload: bool = False
    """Keep the activations that `enable_gradient_checkpointing` saves in host memory. For GPUs and long rows."""

    share_prompts: str = setting("auto", choices=("auto", "always", "never"))
    """Compute a prompt once for all of its responses in a forward pass; results are equal up to rounding. `auto`: if
    the model can attend over packed rows (full attention, `sdpa`), which is tested at the start. `always`: the run is
    refused if the model cannot. `never`: the prompt is repeated for each response."""

    lora: LoraConfig = field(default_factory=LoraConfig)
