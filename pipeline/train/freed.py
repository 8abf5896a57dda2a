"""Gives freed memory back to the system.

The C library keeps freed memory. After the pass of a critic, gradients lie between its freed activations, and the actor
cannot use all of the gaps: the process would grow by more than half of the activations of a second pass.
"""

import ctypes


def give_back() -> None:
    """Return the freed memory of this process to the system, if the C library can do so (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
