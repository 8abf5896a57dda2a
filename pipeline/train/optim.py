"""AdamW and its learning-rate schedule. Settings are checked against the bounds that the config declares."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from pipeline.config.learner import OptimConfig
from pipeline.train.schedule import rate_factor


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose state is in host memory between steps.

    A step takes one parameter after the other, so the device holds the state of one. The numbers are AdamW's.
    """

    HOST = torch.device("cpu")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See `torch.optim.AdamW.step`; a closure is not supported."""
        assert closure is None
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._move(parameter, parameter.device)
                        self.param_groups = [group | {"params": [parameter]}]
                        super().step()
                        self._move(parameter, self.HOST)
        finally:
            self.param_groups = groups

    def _move(self, parameter: nn.Parameter, device: torch.device) -> None:
        """Have the moments of a parameter on `device`; its count of steps stays where fused AdamW wants it."""
        state = self.state[parameter]
        for name, value in state.items():
            if name != "step":
                state[name] = value.to(device)


def build_optimizer(model: nn.Module, config: OptimConfig, offload: str = "none") -> torch.optim.Optimizer:
    """AdamW over the trainable parameters of `model`, which is sharded already.

    Weight decay applies to matrices alone, not to vectors (norms, biases). `offload` is `fsdp.offload`. The learning
    rate of the groups of `adamw_8bit` is a tensor.
    """
    if len(config.betas) != 2:
        raise ValueError(f"optim.betas={list(config.betas)} must be two numbers.")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.betas[0], config.betas[1])
    filled = [group for group in groups if group["params"]]
    if config.name == "adamw_8bit":
        from torchao.optim import AdamW8bit

        return AdamW8bit(filled, lr=config.lr, betas=betas, eps=config.eps)
    kind = OffloadedAdamW if offload == "optimizer" else torch.optim.AdamW
    return kind(filled, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def bytes_kept(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's part of a trained parameter and of AdamW's two averages of it."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    weights = local.numel() * local.element_size()
    # With 8 bits: a byte a number, and a scale of four bytes for 256 of them.
    averages = weights if isinstance(optimizer, torch.optim.AdamW) else local.numel() * (256 + 4) // 256
    return weights + 2 * averages


def build_scheduler(optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int) -> LambdaLR:
    """The schedule of `rate_factor` over `total_steps` optimiser steps; `step()` is called after each."""
    return LambdaLR(optimizer, rate_factor(config, total_steps))
