"""Convert values to plain data and back, to pass them out of the process of a program under test.

The data is JSON, with a tag for each type that JSON does not have. Reading it makes only built-in values, so a hostile
sender can choose a value but not run code. A list in the JSON is always `[tag, ...]`: `l`ist, `t`uple, `s`et,
`f`rozenset, `d`ict, `b`ytes, `c`omplex, `n`on-finite float, `i`nteger of many digits, `r`esult of an earlier call (only
the program's process can read this one).
"""

from __future__ import annotations

import json
import math
import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes as long to import as a small program to run
    from collections.abc import Iterable, Mapping
    from typing import Any, BinaryIO

MAX_FRAME = 16 << 20  # bytes of one message, and of all that a program answers in a test
MAX_DEPTH = 200  # of containers within containers: as many as Python reads in a literal
MAX_ALIKE = 64  # different keys of a set or dict with one hash; each further one takes longer

_SEQUENCES: dict[str, Any] = {"l": list, "t": tuple, "s": set, "f": frozenset}


class NotPlain(ValueError):
    """Error for a value that is not plain data."""


def pack(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Convert `value` to JSON data.

    A subclass of a built-in type becomes the built-in type, and NumPy values become the result of their `tolist`.

    Raises:
        NotPlain: the value is, or holds, a value of another type, or is nested too deeply.
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
    if isinstance(value, (bytes, bytearray)):
        return ["b", bytes(value).hex()]
    if isinstance(value, complex):
        return ["c", pack(value.real), pack(value.imag)]
    if depth == 0:
        raise NotPlain(f"data that is nested more than {MAX_DEPTH} deep")
    for tag, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return [tag, *(pack(item, depth - 1) for item in kind.__iter__(value))]
    if isinstance(value, dict):
        return ["d", *([pack(key, depth - 1), pack(item, depth - 1)] for key, item in dict.items(value))]
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return pack(value.tolist(), depth - 1)
    raise NotPlain(f"a value of the type {type(value).__name__}, which is not plain data")


def unpack(data: Any, results: Mapping[int, Any] | None = None, depth: int = MAX_DEPTH) -> Any:
    """Convert data from `pack` back to the value.

    Args:
        data: the packed value.
        results: results of earlier calls by number, to which the data may refer; None: it must not.
        depth: maximum nesting.

    Raises:
        ValueError, TypeError, KeyError, IndexError: `data` is not a packed value.
    """
    if isinstance(data, dict):
        raise ValueError("a JSON object is not a packed value")
    if not isinstance(data, list):
        return data
    if depth == 0:
        raise NotPlain(f"data that is nested more than {MAX_DEPTH} deep")
    tag, rest = data[0], data[1:]
    if tag in ("s", "f"):
        return _SEQUENCES[tag](distinct(unpack(item, results, depth - 1) for item in rest))
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](unpack(item, results, depth - 1) for item in rest)
    if tag == "d":
        items = [(unpack(key, results, depth - 1), unpack(item, results, depth - 1)) for key, item in rest]
        distinct(key for key, _ in items)
        return dict(items)
    if tag == "b":
        return bytes.fromhex(rest[0])
    if tag == "c":
        return complex(unpack(rest[0]), unpack(rest[1]))
    if tag == "n":
        return float({"nan": "nan", "inf": "inf", "-inf": "-inf"}[rest[0]])
    if tag == "i":
        return int(rest[0], 16)
    if tag == "r" and results is not None:
        return results[rest[0]]
    raise ValueError(f"{tag!r} is not a tag of a packed value")


def distinct(keys: Iterable[Any]) -> list[Any]:
    """Return the distinct keys, in order.

    Raises:
        ValueError: more than `MAX_ALIKE` keys have the same hash, so a set or dict of them would take quadratic time.
        TypeError: a key has no hash.
    """
    seen: dict[Any, None] = {}
    alike: dict[int, int] = {}
    for key in keys:
        if key not in seen:
            seen[key] = None
            alike[hash(key)] = alike.get(hash(key), 0) + 1
            if alike[hash(key)] > MAX_ALIKE:
                raise ValueError(f"more than {MAX_ALIKE} keys with one hash")
    return list(seen)


def write(fd: int, data: bytes | bytearray) -> None:
    """Write all of `data` to a pipe."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def send(fd: int, message: Any) -> None:
    """Write a message to a pipe: a line of JSON."""
    write(fd, json.dumps(message, separators=(",", ":")).encode() + b"\n")


def receive(pipe: BinaryIO) -> Any:
    """Read the next message of a pipe.

    Raises:
        EOFError: the other end is closed, or the line is longer than `MAX_FRAME`.
        ValueError: the line is not JSON.
    """
    line = pipe.readline(MAX_FRAME)
    if not line.endswith(b"\n"):
        raise EOFError("the program ended")
    return json.loads(line)
