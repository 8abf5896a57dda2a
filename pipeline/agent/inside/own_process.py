"""Settings that an environment process makes for itself in the operating system.

This module needs Python 3.9 and nothing but the standard library.
"""

from __future__ import annotations

import os


def first_to_go() -> None:
    """Make the kernel kill this process first, rather than the engine, if the machine runs out of memory."""
    name = "/proc/self/oom_score_adj"
    place = os.open(name, os.O_RDONLY)
    done = os.read(place, 16) == b"1000\n"
    os.close(place)
    # In isolation the file has been written by now, and cannot be written again.
    if not done:
        place = os.open(name, os.O_WRONLY)
        os.write(place, b"1000")
        os.close(place)


def silence(*descriptors: int) -> None:
    """Redirect these descriptors to `/dev/null`."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor)
    os.close(nothing)
