"""A small model whose weights follow from a number."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(13, 7)
        self.scale = nn.Parameter(torch.randn(()))
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11)
