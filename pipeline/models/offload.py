"""Activations that wait in host memory from the forward to the backward pass.

With gradient checkpointing a forward pass keeps the input of each layer, [B, T, H], and computes the rest again. Those
inputs are copied to pinned host memory as they are saved, and back as the backward pass reaches their layer: 2 B T H
bytes for a layer in bfloat16 each way, while the layer computes some 96 B T H^2 operations.
"""

import functools
from typing import Any

import torch
from torch.autograd import graph


def offload_activations(decoder: Any) -> None:
    """Keep the tensors that `decoder` saves for the backward pass in host memory, from now on."""
    forward = decoder.forward

    @functools.wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        with graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return forward(*args, **kwargs)

    decoder.forward = offloaded
