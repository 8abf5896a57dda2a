"""Frames between a run and the processes of its episodes: 4 bytes of length, then JSON in UTF-8.

This module needs Python 3.9 and nothing but the standard library. Frames are JSON, which is data and not code, because
an untrusted process may write them. An engine reads further untrusted input: bodies of requests, and texts of errors.
The bounds of this module hold for all of it, so that none of it blocks the engine's event loop and its other episodes.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from typing import Any, NoReturn

MAX_FRAME = 16 << 20
"""Most bytes of a frame to a process, such as a row."""
MAX_HEARD = 4 << 20
"""Most bytes that an engine reads as one piece of JSON, such as a frame of a process or the body of a request."""
MAX_VALUES = 100_000
"""Most values in such a piece."""
MAX_LEVELS = 100
"""Most levels of lists and objects. Python's own limit is 1,000 calls, and callers have used some."""
MAX_MESSAGES = 4096
"""Most messages of a conversation that an engine reads."""
MAX_TOOLS = 256
"""Most tools of a server or a program."""
MAX_TEXT = 1 << 20
"""Most characters of one text that a process sends for the policy."""
MAX_REASON = 2000
"""Most characters of the reason of a failure."""
HEADER = struct.Struct(">I")
_LEFT_OUT = "\n[... {:,} characters are left out ...]\n"
_READ = 1 << 16


def text_of(error: BaseException) -> str:
    """Return the message of an exception; empty if it cannot be made."""
    try:
        return str(error)
    # The user's class may have a `__str__` that fails or ends the process.
    except BaseException:  # noqa: BLE001
        return ""


def cut(text: str, most: int) -> str:
    """Cut the middle out of `text` if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    mark = _LEFT_OUT.format(len(text) - most)
    head, tail = most - most // 2, most // 2 - len(mark)
    return text[:head] + mark + text[-tail:]


def depth(value: Any) -> int:
    """Count the levels of lists and dicts."""
    levels, level = 0, [value]
    while level := [entry for entry in level if isinstance(entry, (dict, list))]:
        levels += 1
        level = [
            entry for container in level for entry in (container.values() if isinstance(container, dict) else container)
        ]
    return levels


def encode(value: Any, most: int = MAX_FRAME) -> bytes:
    """Write a frame. NumPy values become the result of `tolist`; lone surrogates, which UTF-8 lacks, question marks.

    Raises:
        ValueError: the value cannot be written as JSON, or is longer than `most` bytes.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error})") from None
    body = text.encode("utf-8", "replace")
    if len(body) > most:
        raise ValueError(f"{len(body):,} bytes, more than the {most:,} of a frame")
    return HEADER.pack(len(body)) + body


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")


def loads(text: str) -> Any:
    """Read JSON in which all numbers are finite.

    Raises:
        ValueError: the text is not JSON, or has integers of thousands of digits.
        RecursionError: the JSON is nested too deep.
    """
    return json.loads(text, parse_constant=_refused, parse_float=_finite)


def decode(body: bytes) -> dict[str, Any]:
    """Read the object in the body of a frame, with valid UTF-8 in all its strings, and with finite numbers.

    Raises:
        ValueError: the body is not a JSON object, or is nested too deep.
    """
    try:
        # With bytes, `json` would accept half characters.
        value = loads(body.decode())
        if b"\\u" in body:
            # An escape may stand for a lone surrogate, which later code could not encode.
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    if body.count(b"[") + body.count(b"{") > MAX_LEVELS and depth(value) > MAX_LEVELS:
        raise ValueError(f"JSON of more than {MAX_LEVELS} levels")
    return value


def heard(body: bytes) -> dict[str, Any]:
    """Read the object in untrusted JSON, within the bounds of an engine.

    Raises:
        ValueError: as `decode`, or the JSON is longer or has more values than an engine reads.
    """
    if len(body) > MAX_HEARD:
        raise ValueError(f"{len(body):,} bytes, more than {MAX_HEARD:,}")
    if _values(body) > MAX_VALUES and _values(_without_texts(body)) > MAX_VALUES:
        raise ValueError(f"JSON of more than {MAX_VALUES:,} values")
    return decode(body)


def _values(body: bytes) -> int:
    """Return an upper bound of the number of values in JSON, before they are made."""
    return sum(map(body.count, (b"[", b"{", b",")))


def _without_texts(body: bytes) -> bytes:
    """Empty the texts in JSON."""
    return b'""'.join(body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text:.40} is more than a number can be")
    return number


def length_of(header: bytes, most: int = MAX_FRAME) -> int:
    """Return the length of the body after a header.

    Raises:
        ValueError: the body is longer than `most`.
    """
    (length,) = HEADER.unpack(header)
    if length > most:
        raise ValueError(f"a frame of {length:,} bytes, more than {most:,}")
    return int(length)


def read(connection: socket.socket, header: bytes = b"") -> dict[str, Any] | None:
    """Read the next frame of a blocking socket; returns None if the other end is closed.

    Args:
        header: beginning of the frame's header, if it has been read.

    Raises:
        OSError: the connection broke.
        ValueError: as `decode` and `length_of`.
    """
    header += _exactly(connection, HEADER.size - len(header))
    if len(header) < HEADER.size:
        return None
    return decode(_exactly(connection, length_of(header)))


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Read `count` bytes; fewer if the other end is closed."""
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), _READ))
        if not part:
            break
        data += part
    return bytes(data)
