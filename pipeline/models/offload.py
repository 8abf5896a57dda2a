"""Offloading of activations: they are kept in host memory between the forward and the backward pass.

With gradient checkpointing a forward pass saves only the input of each layer, [B, T, H], and the backward pass computes
the rest again. Each input is copied to pinned host memory when it is saved, and back when the backward pass reaches its
layer. In bfloat16 these are 2 B T H bytes per layer in each direction, during some 96 B T H^2 operations of the layer.
"""

import functools
from typing import Any

import torch
from torch.autograd import graph


def offload_activations(decoder: Any) -> None:
    """Change `decoder.forward` so that all tensors saved for the backward pass are kept in host memory."""
    forward = decoder.forward

    @functools.wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        with graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return forward(*args, **kwargs)

    decoder.forward = offloaded
