"""Settings of the trained model (`model.*`)."""

import importlib.util
import re
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.bounds import setting

ALL_LINEAR = "all-linear"
LARGEST_ALONE = 512
"""Largest rank for which vLLM makes room."""


@dataclass
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021): the base model is frozen, and each chosen weight W becomes
    W + alpha / rank * B A with two small trained matrices."""

    rank: int = setting(0, at_least=0)
    """Rows of A and columns of B; 0 trains all weights and has no adapter."""

    alpha: float = setting(16.0, above=0)
    """Adapters are scaled by `alpha / rank`."""

    target_modules: Any = ALL_LINEAR
    """Linear layers that get an adapter: `all-linear` (all but the head), a list of names such as
    `[q_proj,v_proj]`, or a regular expression for whole names."""

    publish: str = setting("merged", choices=("merged", "adapter"))
    """What engines get: the base `merged` with the adapter, as whole weights; or the `adapter` alone, which is small.
    They then read the base from `model.path`, and generate more slowly."""

    path: str | None = setting(None, path="model")
    """Folder of an adapter in peft's format to start from; null starts with B = 0, which is the base model."""

    @property
    def alone(self) -> bool:
        """Whether engines get the adapter without the base."""
        return self.rank > 0 and self.publish == "adapter"

    @property
    def well_formed(self) -> bool:
        """Whether the targets are of a kind that can be read."""
        targets = self.target_modules
        if isinstance(targets, str):
            try:
                return bool(targets and re.compile(targets))
            except re.error:
                return False
        return isinstance(targets, list) and bool(targets) and all(isinstance(name, str) for name in targets)

    def problems(self) -> dict[str, object]:
        """Sentences on settings that exclude each other, and whether each applies (see `sentences`)."""
        return {
            "{model.lora.path} does nothing with {model.lora.rank}; set that to the adapter's": (
                self.path and not self.rank
            ),
            "{model.lora.publish} does nothing with {model.lora.rank}; set a rank": (
                self.publish == "adapter" and not self.rank
            ),
            f"{{model.lora.rank}} is more than the {LARGEST_ALONE} of an engine's adapter; set "
            "model.lora.publish=merged": self.alone and self.rank > LARGEST_ALONE,
            "{model.lora.rank} needs the Python package peft on every node: pip install 'slipstream-rl[lora]'": (
                self.rank and importlib.util.find_spec("peft") is None
            ),
            "{model.lora.target_modules} must be all-linear, a list of names or a regular expression": (
                not self.well_formed
            ),
        }

    def unmatched(self, names: list[str]) -> list[str]:
        """Those of the targets that no layer in `names` matches."""
        targets = self.target_modules
        entries = [targets] if isinstance(targets, str) else list(targets)
        return [str(entry) for entry in entries if not any(_matches(entry, targets, name) for name in names)]

    def chosen(self, names: list[str]) -> list[str]:
        """Those of the linear layers in `names` that get an adapter."""
        targets = self.target_modules
        entries = [targets] if isinstance(targets, str) else list(targets)
        return [name for name in names if any(_matches(entry, targets, name) for entry in entries)]


def _matches(entry: Any, targets: Any, name: str) -> bool:
    """As peft reads it: a text is a pattern of whole names, an entry of a list the last parts of a name."""
    if isinstance(targets, str):
        return targets == ALL_LINEAR or re.fullmatch(targets, name) is not None
    return name == entry or name.endswith(f".{entry}")


@dataclass
class ModelConfig:
    """The language model that is trained."""

    path: str | None = setting(None, path="model")
    """Hugging Face model: a local folder or a hub name."""

    tokenizer_path: str | None = setting(None, path="model")
    """Tokenizer folder or hub name; null takes it from `path`."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Read that code first."""

    dtype: str = setting("float32", choices=("float32", "bfloat16"))
    """Type of the trained weights, in which their gradients are added up. Of `bfloat16` weights AdamW's state holds the
    lower halves of float32 ones, so that small steps count: 14 bytes a weight in all instead of 16."""

    attn_implementation: str = "sdpa"
    """Attention of the trained model, as `transformers` names it."""

    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""

    activation_offload: bool = False
    """Let what `enable_gradient_checkpointing` keeps of each layer wait in host memory; for GPUs and long rows."""

    share_prompts: str = setting("auto", choices=("auto", "always", "never"))
    """Let samples in one forward pass share a copy of their prompt; numbers are the same up to rounding. `auto`: in
    models that attend over packed rows, which is found out at the start (full attention, `sdpa`). `always`: models that
    cannot are refused."""

    lora: LoraConfig = field(default_factory=LoraConfig)
