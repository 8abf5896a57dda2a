"""A small model whose weights follow from a number."""

import torch
from torch import nn


class Model(nn.Module):
    """Its buffers have types of all sizes, stand between its parameters and take odd numbers of bytes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(13, 7)
        self.scale = nn.Parameter(torch.randn(()))
        self.flags = nn.Buffer(torch.rand(5) < 0.5)
        self.norm = nn.LayerNorm(7)
        self.norm.counts = nn.Buffer(torch.randint(2**40, (3,)))
        self.bias = nn.Buffer(torch.randn(3))
        self.frequencies = nn.Buffer(torch.randn(4), persistent=False)
        self.head = nn.Linear(7, 11)

    def state(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """What arrives at an engine that computes in `dtype`."""
        weights = {name for name, _ in self.named_parameters()}
        return {name: tensor.to(dtype) if name in weights else tensor for name, tensor in self.state_dict().items()}
