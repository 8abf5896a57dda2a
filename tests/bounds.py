"""A bound on the CPU time that hostile input costs.

It tells linear time from quadratic or exponential time, so the inputs are large and the bound is wide: other machines
are slower by several times.
"""

import contextlib
import gc
import time
from collections.abc import Iterator


@contextlib.contextmanager
def bounded(cpu_s: float = 30.0) -> Iterator[None]:
    """Fail if the body costs this process more CPU time, in seconds.

    Objects of earlier tests are hidden from the garbage collector: walking over them is not the body's cost.
    """
    gc.freeze()
    begun = time.process_time()
    try:
        yield
    finally:
        gc.unfreeze()
    spent = time.process_time() - begun
    assert spent < cpu_s, f"{spent:.1f} s of CPU time, more than {cpu_s:g} s"
