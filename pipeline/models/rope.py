"""Rotary embeddings with the same frequencies in every pass.

In `transformers` two kinds of rotary embedding choose their frequencies by the longest row of a pass: `longrope` has
one set of factors for short rows and one for long rows, and `dynamic` changes the frequencies if a row is longer than
`max_position_embeddings`. So the numbers of a row would depend on the other rows. vLLM chooses once, at the start: for
`longrope` by the longest row that it may get, for `dynamic` by `max_position_embeddings`. Trainer and scoring replicas
make the same choice here.
"""

from typing import Any

from torch import nn

FIXED = "fixed"
"""Value of `rope_type` in a module whose frequencies were fixed here."""


def fix_ropes(model: nn.Module, longest: int | None = None) -> str | None:
    """Fix the frequencies of the rotary embeddings in a model of `transformers`, the same for all rows.

    Returns a clause on the choice for the user; None if nothing had to be fixed.

    Args:
        model: just loaded from its checkpoint.
        longest: length of the longest row in tokens; None for the model's `max_position_embeddings`.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope: Any
    found = None
    for rope in model.modules():
        kinds = getattr(rope, "rope_type", None)
        config = getattr(rope, "config", None)
        # The positions of a vision tower, in an image, have no limit.
        if config is None or not hasattr(config, "max_position_embeddings") or not isinstance(kinds, str | dict):
            continue
        # Some families have one for each kind of layer.
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            most = config.max_position_embeddings
            if kind == "longrope":
                settings = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
                border = settings["original_max_position_embeddings"]
                beyond = (longest or most) > border
                length = border + int(beyond)
                found = f"rope 'longrope' has its {'long' if beyond else 'short'} factors in all rows, as the longest "
                found += f"may have {longest or most} tokens (original_max_position_embeddings={border})"
            elif "dynamic" in kind:
                length = most
                found = f"rope {kind!r} has the frequencies of max_position_embeddings={most} in all rows"
            else:
                continue
            prefix = "" if layer_type is None else f"{layer_type}_"
            before = getattr(rope, f"{prefix}inv_freq")
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
                config, before.device, seq_len=length, layer_type=layer_type
            )
            rope.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
            setattr(rope, f"{prefix}attention_scaling", scaling)
            rope.rope_type = FIXED if layer_type is None else {**rope.rope_type, layer_type: FIXED}
    return found
