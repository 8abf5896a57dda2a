"""Plain data that leaves the process of a program under test: JSON, with a tag for each type that JSON lacks.

Only data is read back, so a hostile sender can choose a value and no more. A list in the JSON is always `[tag, ...]`:
`l`ist, `t`uple, `s`et, `f`rozenset, `d`ict, `b`ytes, `c`omplex, `n`on-finite float, `i`nteger of many digits, `h`andle
of an object that stays in the program's process.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes as long to import as a small program to run
    from typing import Any, BinaryIO

MAX_FRAME = 16 << 20  # bytes of one message, and of the result of a function

_SEQUENCES: dict[str, Any] = {"l": list, "t": tuple, "s": set, "f": frozenset}


def no_handle(*_: Any) -> Any:
    """The `handle` of data that may hold no objects."""
    raise ValueError("not plain data")


def pack(value: Any, handle: Callable[[Any], list[Any]] = no_handle) -> Any:
    """`value` as JSON data.

    A subclass of a built-in type becomes the built-in type, NumPy values become what their `tolist` says, and any other
    object what `handle` makes of it.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        value = int.__int__(value)
        return value if -(1 << 53) < value < 1 << 53 else ["i", hex(value)]
    if isinstance(value, float):
        value = float.__float__(value)
        return value if math.isfinite(value) else ["n", repr(value)]
    if isinstance(value, str):
        return str.__str__(value)
    for tag, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return [tag, *(pack(item, handle) for item in kind.__iter__(value))]
    if isinstance(value, dict):
        return ["d", *([pack(key, handle), pack(item, handle)] for key, item in dict.items(value))]
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).hex()]
    if isinstance(value, complex):
        return ["c", pack(value.real), pack(value.imag)]
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return pack(value.tolist(), handle)
    return handle(value)


def unpack(data: Any, handle: Callable[[int, str], Any] = no_handle) -> Any:
    """The value that `pack` made `data` of.

    Raises:
        ValueError, TypeError, KeyError, IndexError, RecursionError: `data` is nothing that `pack` makes.
    """
    if isinstance(data, dict):
        raise ValueError("a JSON object is no packed value")
    if not isinstance(data, list):
        return data
    tag, rest = data[0], data[1:]
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](unpack(item, handle) for item in rest)
    if tag == "d":
        return {unpack(key, handle): unpack(item, handle) for key, item in rest}
    if tag == "b":
        return bytes.fromhex(rest[0])
    if tag == "c":
        return complex(unpack(rest[0]), unpack(rest[1]))
    if tag == "n":
        return float({"nan": "nan", "inf": "inf", "-inf": "-inf"}[rest[0]])
    if tag == "i":
        return int(rest[0], 16)
    if tag == "h":
        return handle(int(rest[0]), str(rest[1])[:100])
    raise ValueError(f"{tag!r} is no tag of a packed value")


def write(fd: int, data: bytes | bytearray) -> None:
    """Write all of `data` to a pipe."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def send(fd: int, message: Any) -> None:
    """Write a message to a pipe: a line of JSON."""
    write(fd, json.dumps(message, separators=(",", ":")).encode() + b"\n")


def receive(pipe: BinaryIO) -> Any:
    """The next message of a pipe.

    Raises:
        EOFError: the other end is closed, or the line is longer than `MAX_FRAME`.
        ValueError: the line is no JSON.
    """
    line = pipe.readline(MAX_FRAME)
    if not line.endswith(b"\n"):
        raise EOFError("the program ended")
    return json.loads(line)
