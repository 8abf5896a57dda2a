"""AdamW and its learning-rate schedules. Settings are checked against the bounds that the config declares."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from pipeline.config.learner import OptimConfig

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 0.0,
    "cosine": lambda progress: (1 - math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: progress,
}
"""Share of the way from the peak to the floor, over the progress of the decay from 0 to 1."""


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


def build_scheduler(optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int) -> LambdaLR:
    """Linear warm-up from `lr / warmup` to `lr`, then the schedule down to `lr * min_lr_ratio` at the last step.

    Args:
        optimizer: from `build_optimizer`.
        config: warm-up lasts `lr_warmup_steps`, or `lr_warmup_steps_ratio` of `total_steps` if that is negative.
        total_steps: optimiser steps of the whole run; `step()` is called once after each.
    """
    shape = SHAPES[config.lr_scheduler_type]
    warmup = config.warmup(total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
        return 1 - (1 - config.min_lr_ratio) * shape(progress)

    return LambdaLR(optimizer, factor)
