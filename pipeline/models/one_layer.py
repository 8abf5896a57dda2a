"""A small model of the same class, on which a model is tried if this process has only slices of its weights."""

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def whole(model: Any) -> Any:
    """Return `model` itself if this process has its whole weights; else a small model of the same class.

    The small model has few layers, at least one of each kind, a vocabulary of at most 64 tokens, and random weights
    that are equal on all ranks.
    """
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or [None]
    # As many layers as it takes to have each kind once.
    text.num_hidden_layers = 1 + max(kinds.index(kind) for kind in set(kinds))
    text.vocab_size, text.pad_token_id = min(text.vocab_size, 64), None
    if kinds != [None]:
        text.layer_types = kinds[: text.num_hidden_layers]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = type(model)._from_config(config, dtype=model.dtype).train(model.training)
    for name, rope in model.named_modules():
        # The frequencies are chosen already (`rope.py`).
        if hasattr(rope, "rope_type") and name in dict(made.named_modules()):
            made.set_submodule(name, copy.deepcopy(rope))
    return made
