"""The device on which Megatron runs. Each entry into its code is within `on_device`.

Megatron asks for a GPU at many places without looking first. On GPUs nothing has to be done. The tests of this project
put a shim here, with which it runs on CPUs (tests/megatron/shim.py).
"""

from contextlib import AbstractContextManager, nullcontext


def _on_gpu() -> AbstractContextManager[None]:
    return nullcontext()


enter = _on_gpu
"""Makes the context; replaced by tests."""


def on_device() -> AbstractContextManager[None]:
    """Return a context in which Megatron's code runs on this process's device."""
    return enter()
