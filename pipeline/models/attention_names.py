"""A check of the name in `model.attn_implementation`."""

from pipeline.config.model import ModelConfig
from pipeline.errors import nearest

PLAIN = ("eager", "sdpa")
"""Names that are known without a look into `transformers`."""


def check_attention(model: ModelConfig) -> None:
    """Check that `transformers` has the attention `model.attn_implementation`.

    A name with a slash, a kernel of the Hub, is not checked.

    Raises:
        ValueError: `transformers` does not know the name; the sentence lists the known names.
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
