"""Megatron on CPUs over gloo, for tests alone: what it asks of CUDA without looking first is answered by the CPU.

    current_device, synchronize, streams, events     the CPU; nothing
    states of random generators                      those of the CPU
    device="cuda"                                    a mode for functions of torch: the CPU
    tensor.cuda(), tensor.type()                     the tensor itself; the name that optimisers compare with
    sizes that the dispatcher of experts exchanges   numbers

Fused functions are compiled by `torch.compile`, so it is switched off.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _OnCpu(TorchFunctionMode):
    """Functions that would use a GPU use the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.backward:
            # The mode is off in here, and the backward pass asks for the GPU too.
            with self:
                return torch.autograd.backward(args[0], kwargs.get("gradient"))
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = {**kwargs, "device": CPU}
        return func(*args, **kwargs)


class _Idle:
    """A stream or an event that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _Idle()


def _numbers(value: Any, as_numpy: bool = False, **_: Any) -> Any:
    return value.numpy() if as_numpy and isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let Megatron run on this process's CPU within the block."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    cuda = {
        "current_device": lambda: CPU,
        "synchronize": lambda *_: None,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "current_stream": lambda *_: _Idle(),
        "stream": lambda *_: contextlib.nullcontext(),
        "Stream": _Idle,
        "Event": _Idle,
        "empty_cache": lambda: None,
    }
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        mock.patch.object(random, "_set_cuda_rng_state", lambda *_, **__: None),
        mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _numbers),
        _OnCpu(),
    ):
        yield


def install() -> None:
    """Let Megatron run on CPUs in this process."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from pipeline.megatron import device

    device.enter = on_cpu
