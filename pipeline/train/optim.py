"""AdamW, in variants for bfloat16 weights and for a state in host memory, and its learning-rate schedule."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.lr_scheduler import LambdaLR

from pipeline.config.learner import OptimConfig
from pipeline.train.schedule import rate_factor

LOW = "low_half"
"""Name in the optimiser's state of the lower 16 bits of float32 weights, if the parameter is bfloat16."""


class ByParameterAdamW(torch.optim.AdamW):
    """AdamW that updates one parameter after the other, in float32 also if parameters are bfloat16.

    The result equals AdamW's on float32 weights. A bfloat16 parameter holds the upper 16 bits of each float32 weight,
    rounded; the optimiser's state holds the lower 16 bits. In plain bfloat16, steps that are small compared with the
    weight are lost: at a learning rate of 1e-6, nearly all.

    Args, in addition to AdamW's:
        host: whether the state is in host memory between steps. The device then holds one parameter's state at a time.
    """

    HOST = torch.device("cpu")

    def __init__(self, groups: list[dict[str, Any]], host: bool, **options: Any) -> None:
        super().__init__(groups, fused=True, **options)
        self._host = host

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See `torch.optim.AdamW.step`; a closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if self._host:
                        self._move(parameter, parameter.device)
                    self._step(parameter, group)
                    if self._host:
                        self._move(parameter, self.HOST)

    def _step(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.dtype == torch.bfloat16:
                state[LOW] = torch.zeros_like(parameter, dtype=torch.int16)
        weight, gradient = _local(parameter), _local(parameter.grad).float()
        low = _local(state[LOW]) if LOW in state else None
        whole = weight if low is None else joined(weight, low)
        adamw(
            *([whole], [gradient], [_local(state["exp_avg"])], [_local(state["exp_avg_sq"])], [], [state["step"]]),
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            **{name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")},
        )
        if low is not None:
            for half, value in zip((weight, low), halves(whole), strict=True):
                half.copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.AdamW.load_state_dict`, which would convert the state to the type of the weights."""
        super().load_state_dict(state_dict)
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for number, parameter in zip(numbers, parameters, strict=True):
            device = self.HOST if self._host else parameter.device
            for name, value in state_dict["state"].get(number, {}).items():
                if name != "step":
                    self.state[parameter][name] = value.to(device)

    def _move(self, parameter: nn.Parameter, device: torch.device) -> None:
        """Move the state of a parameter to `device`, except the count of steps, which fused AdamW needs on the device
        of the parameter."""
        state = self.state[parameter]
        for name, value in state.items():
            if name != "step":
                state[name] = value.to(device)


def halves(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 numbers into two tensors of 16 bits and the same shape; `joined` reverses this exactly.

    Returns the numbers as bfloat16, rounded to the nearest, and int16 differences between the float32 bits and the bits
    of the bfloat16 numbers.
    """
    # Rounding up would make a zero of a NaN with other bits, such as a GPU's.
    bits = whole.masked_fill(whole.isnan(), torch.nan).view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def joined(high: Tensor, low: Tensor) -> Tensor:
    """Join the two results of `halves` into the float32 numbers, of the same shape."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def build_optimizer(model: nn.Module, config: OptimConfig, offload: str = "none") -> torch.optim.Optimizer:
    """Build AdamW over the trainable parameters of `model`.

    Weight decay applies only to matrices, not to vectors (norms, biases). With `adamw_8bit` the learning rate in
    `param_groups` is a tensor, and bfloat16 weights are rounded up or down at random, so that small steps count on
    average.

    Args:
        model: sharded already.
        config: the section `optim`.
        offload: `fsdp.offload`; with `optimizer` the state is in host memory between steps.
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

        return AdamW8bit(filled, lr=config.lr, betas=betas, eps=config.eps, bf16_stochastic_round=True)
    host = offload == "optimizer"
    if host or any(parameter.dtype == torch.bfloat16 for parameter in trained):
        return ByParameterAdamW(filled, host, lr=config.lr, betas=betas, eps=config.eps)
    return torch.optim.AdamW(filled, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def bytes_kept(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> int:
    """Return the number of bytes of this rank's part of a trained parameter and of its AdamW state."""
    count = _local(parameter).numel()
    if isinstance(optimizer, torch.optim.AdamW):
        # The weight and two averages in float32; of a bfloat16 weight the lower half is in the state.
        return 3 * 4 * count
    # With 8 bits: a byte a number, and a scale of four bytes for 256 of them.
    return count * parameter.element_size() + 2 * (count * (256 + 4) // 256)


class _Rates(LambdaLR):
    """The learning-rate schedule of an optimiser of another library, `optimizer`, that has torch's `param_groups`."""

    def __init__(self, optimizer: Any, config: OptimConfig, total_steps: int) -> None:
        self._theirs = optimizer
        # torch's schedules take only its own optimisers.
        stand_in = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.lr)
        super().__init__(stand_in, rate_factor(config, total_steps))

    def step(self, epoch: int | None = None) -> None:
        # torch warns of a schedule that steps before its optimiser.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        super().step(epoch)
        for group in self._theirs.param_groups:
            group["lr"] = self.get_last_lr()[0]


def build_scheduler(optimizer: Any, config: OptimConfig, total_steps: int) -> LambdaLR:
    """Build the learning-rate schedule of `rate_factor`. The caller calls `step()` after each optimiser step.

    Args:
        optimizer: its learning rate is set; an optimiser of torch, or one with the same `param_groups`.
        config: the section `optim`.
        total_steps: number of optimiser steps of the run.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return _Rates(optimizer, config, total_steps)
    return LambdaLR(optimizer, rate_factor(config, total_steps))


def set_steps(scheduler: LambdaLR, steps: int) -> None:
    """Set the learning rate to its value after `steps` optimiser steps."""
    scheduler.last_epoch = steps - 1
    scheduler.step()
