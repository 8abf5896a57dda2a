"""Settings that an environment process makes for itself.

Needs Python 3.9 and nothing but the standard library.
"""

from __future__ import annotations

import os


def first_to_go() -> None:
    """Have the kernel end this process first, and not the engine, when the machine has no memory left."""
    name = "/proc/self/oom_score_adj"
    place = os.open(name, os.O_RDONLY)
    done = os.read(place, 16) == b"1000\n"
    os.close(place)
    # In isolation it is done by now, and the file cannot be written any more.
    if not done:
        place = os.open(name, os.O_WRONLY)
        os.write(place, b"1000")
        os.close(place)


def silence(*descriptors: int) -> None:
    """What is written to these descriptors from here on goes nowhere, and nothing is read from them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor)
    os.close(nothing)
