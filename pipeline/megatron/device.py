"""The device on which Megatron runs. Each entry into its code is within `on_device`.

Megatron uses a GPU at many places without a check. On GPUs the context does nothing. Tests of this project replace it
by a shim with which Megatron runs on CPUs (tests/megatron/shim.py).
"""

from contextlib import AbstractContextManager, nullcontext


def _on_gpu() -> AbstractContextManager[None]:
    return nullcontext()


enter = _on_gpu
"""Makes the context; replaced by tests."""


def on_device() -> AbstractContextManager[None]:
    """Return a context in which Megatron's code runs on this process's device."""
    return enter()
