"""Frames between a run and the processes of its episodes: 4 bytes of length, then JSON in UTF-8, at most 16 MiB.

Needs Python 3.9 and nothing but the standard library. JSON, because what comes back may be written by anyone: it is
data and no more.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, NoReturn

MAX_FRAME = 16 << 20
HEADER = struct.Struct(">I")
_READ = 1 << 16


def encode(value: Any) -> bytes:
    """A frame. NumPy values become what their `tolist` says; lone surrogates, which UTF-8 lacks, become question marks.

    Raises:
        ValueError: the value is no JSON, or too long.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error})") from None
    body = text.encode("utf-8", "replace")
    if len(body) > MAX_FRAME:
        raise ValueError(f"{len(body):,} bytes, more than the {MAX_FRAME:,} of a frame")
    return HEADER.pack(len(body)) + body


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")


def decode(body: bytes) -> dict[str, Any]:
    """The object in the body of a frame, with valid UTF-8 in all its strings.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        value = json.loads(body, parse_constant=_refused)
        if b"\\u" in body:
            # An escape may stand for a lone surrogate, with which later code could do nothing.
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def length_of(header: bytes) -> int:
    """The length of the body behind a header.

    Raises:
        ValueError: it is longer than a frame may be.
    """
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME:
        raise ValueError(f"a frame of {length:,} bytes, more than {MAX_FRAME:,}")
    return int(length)


def read(connection: socket.socket, header: bytes = b"") -> dict[str, Any] | None:
    """The next frame of a blocking socket; None where the other end is closed.

    Args:
        header: what of its header has been read.

    Raises:
        OSError: the connection broke.
        ValueError: as `decode` and `length_of`.
    """
    header += _exactly(connection, HEADER.size - len(header))
    if len(header) < HEADER.size:
        return None
    return decode(_exactly(connection, length_of(header)))


def _exactly(connection: socket.socket, count: int) -> bytes:
    """`count` bytes; fewer where the other end is closed."""
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), _READ))
        if not part:
            break
        data += part
    return bytes(data)
