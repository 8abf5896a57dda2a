"""Rotary positions that are the same in every pass.

Two kinds of rope choose their frequencies by the longest row of a pass: `longrope` has one set of factors for short
rows and one for long ones, `dynamic` stretches what is longer than the model was made for. So a row's numbers would
depend on its neighbours. vLLM chooses once, when it starts: `longrope` by the longest row that it may get, `dynamic` by
`max_position_embeddings`. Trainer and replicas make the same choice here.
"""

from typing import Any

from torch import nn

FIXED = "fixed"
"""Kind of rope of a module whose frequencies are chosen."""


def fix_ropes(model: nn.Module, longest: int | None = None) -> str | None:
    """Give the ropes in a model of `transformers` one set of frequencies for all rows; returns a clause on the choice.

    Args:
        model: fresh from its checkpoint.
        longest: tokens of the longest row; None for the model's `max_position_embeddings`.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope: Any
    found = None
    for rope in model.modules():
        kinds = getattr(rope, "rope_type", None)
        config = getattr(rope, "config", None)
        if config is None or not isinstance(kinds, str | dict):
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
