"""Plain data between a program under test and its judge: JSON text, with a tag for each type that JSON lacks.

Nothing but data is read back, so a hostile sender can choose a value and no more. A list in the JSON is always
`[tag, ...]`: `l`ist, `t`uple, `s`et, `f`rozenset, `d`ict, `b`ytes, `c`omplex, `n`on-finite float, `i`nteger of many
digits, `h`andle of an object that stays where it is.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes as long to import as a small program to run
    from typing import Any

MAX_FRAME = 16 << 20  # bytes of one message

_SEQUENCES: dict[str, Any] = {"l": list, "t": tuple, "s": set, "f": frozenset}


def pack(value: Any, handle: Callable[[Any], list[Any]]) -> Any:
    """`value` as JSON data.

    A subclass of a built-in type (a named tuple, a Counter, an IntEnum) becomes the built-in type, NumPy values become
    what their `tolist` says, and anything else what `handle` makes of it.
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
        return ["c", pack(value.real, handle), pack(value.imag, handle)]
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return pack(value.tolist(), handle)
    return handle(value)


def unpack(data: Any, handle: Callable[[int, str], Any]) -> Any:
    """The value that `pack` made `data` of.

    Raises:
        ValueError, TypeError, KeyError, IndexError, RecursionError: `data` is nothing that `pack` makes.
    """
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("a JSON object is no packed value")
        return data
    tag, rest = data[0], data[1:]
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](unpack(item, handle) for item in rest)
    if tag == "d":
        return {unpack(key, handle): unpack(item, handle) for key, item in rest}
    if tag == "b":
        return bytes.fromhex(rest[0])
    if tag == "c":
        return complex(unpack(rest[0], handle), unpack(rest[1], handle))
    if tag == "n":
        return float({"nan": "nan", "inf": "inf", "-inf": "-inf"}[rest[0]])
    if tag == "i":
        return int(rest[0], 16)
    if tag == "h":
        return handle(int(rest[0]), str(rest[1])[:100])
    raise ValueError(f"{tag!r} is no tag of a packed value")


def send(fd: int, message: Any) -> None:
    """Writes a message to a pipe: its length in 4 bytes, then JSON.

    Raises:
        ValueError: the message is longer than `MAX_FRAME`.
    """
    text = json.dumps(message, separators=(",", ":")).encode()
    if len(text) > MAX_FRAME:
        raise ValueError(f"a value has {len(text)} bytes as JSON, more than {MAX_FRAME}")
    view = memoryview(len(text).to_bytes(4, "little") + text)
    while view:
        view = view[os.write(fd, view) :]


def receive(fd: int) -> Any:
    """The next message of a pipe.

    Raises:
        EOFError: the other end is closed.
        ValueError: what comes is no message, or too long a one.
    """
    length = int.from_bytes(_exactly(fd, 4), "little")
    if length > MAX_FRAME:
        raise ValueError(f"a message of {length} bytes, more than {MAX_FRAME}")
    return json.loads(_exactly(fd, length))


def _exactly(fd: int, size: int) -> bytearray:
    found = bytearray()
    while len(found) < size:
        part = os.read(fd, min(size - len(found), 1 << 16))
        if not part:
            raise EOFError("the program ended")
        found += part
    return found
