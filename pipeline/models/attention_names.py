"""The names of attention implementations."""

from pipeline.config.model import ModelConfig
from pipeline.errors import nearest

PLAIN = ("eager", "sdpa")
"""Implementations that every model has."""


def check_attention(model: ModelConfig) -> None:
    """Refuse a `model.attn_implementation` that `transformers` does not have; a name with a slash is one of the Hub.

    Raises:
        ValueError: a sentence with the known names.
    """
    name = model.attn_implementation
    if name in PLAIN or "/" in name:
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if name not in known:
        raise ValueError(
            f"model.attn_implementation={name} is not an attention of transformers{nearest(name, known)}; there are: "
            f"{', '.join(known)}"
        )
