"""Settings of the trained model (`model.*`)."""

from dataclasses import dataclass

from pipeline.config.bounds import setting


@dataclass
class ModelConfig:
    """The language model that is trained."""

    path: str | None = None
    """Hugging Face model: a local folder or a hub name."""

    tokenizer_path: str | None = None
    """Tokenizer folder or hub name; null takes it from `path`."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Read that code first."""

    dtype: str = setting("float32", choices=("float32", "bfloat16"))
    """Type of the trained weights and of the optimiser state."""

    attn_implementation: str = "sdpa"
    """Attention of the trained model, as `transformers` names it."""

    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""

    activation_offload: bool = False
    """Let what `enable_gradient_checkpointing` keeps of each layer wait in host memory; for GPUs and long rows."""

    share_prompts: str = setting("auto", choices=("auto", "always", "never"))
    """Let samples in one forward pass share a copy of their prompt; numbers are the same up to rounding. `auto`: on
    CPUs, for models with full attention and `sdpa`. `always`: on any device; models that cannot are refused."""
