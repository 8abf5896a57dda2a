"""Frames between a run and the processes of its episodes: 4 bytes of length, then JSON in UTF-8.

Needs Python 3.9 and nothing but the standard library. JSON, because what comes back may be written by anyone: it is
data and no more. An engine reads further things that anyone may have written: bodies of requests, and texts of errors.
All of it has the bounds of this module, so that none of it holds the engine's event loop, on which its other episodes
wait.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from typing import Any, NoReturn

MAX_FRAME = 16 << 20
"""Bytes of a frame to a process, such as a row."""
MAX_HEARD = 4 << 20
"""Bytes that an engine reads as one piece of JSON, such as a frame of a process or the body of a request."""
MAX_VALUES = 100_000
"""Values in such a piece."""
MAX_LEVELS = 100
"""Levels of lists and objects. Python's own limit is 1,000 calls, and callers have used some."""
MAX_MESSAGES = 4096
"""Messages of a conversation that an engine reads."""
MAX_TOOLS = 256
"""Tools that a server or a program has."""
MAX_TEXT = 1 << 20
"""Characters of one text that a process sends to be read by the policy."""
MAX_REASON = 2000
"""Characters of a text that says why something failed."""
HEADER = struct.Struct(">I")
_LEFT_OUT = "\n[... {:,} characters are left out ...]\n"
_READ = 1 << 16


def text_of(error: BaseException) -> str:
    """The message of an exception."""
    try:
        return str(error)
    # The user's class may have a `__str__` that fails or ends the process.
    except BaseException:  # noqa: BLE001
        return ""


def cut(text: str, most: int) -> str:
    """`text`; if it is longer than `most` characters, its middle is left out."""
    if len(text) <= most:
        return text
    mark = _LEFT_OUT.format(len(text) - most)
    head, tail = most - most // 2, most // 2 - len(mark)
    return text[:head] + mark + text[-tail:]


def depth(value: Any) -> int:
    """Levels of lists and dicts."""
    levels, level = 0, [value]
    while level := [entry for entry in level if isinstance(entry, (dict, list))]:
        levels += 1
        level = [
            entry for container in level for entry in (container.values() if isinstance(container, dict) else container)
        ]
    return levels


def encode(value: Any, most: int = MAX_FRAME) -> bytes:
    """A frame. NumPy values become what their `tolist` says; lone surrogates, which UTF-8 lacks, become question marks.

    Raises:
        ValueError: the value cannot be JSON, or longer than `most` bytes.
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
    """The value of JSON, in which all numbers are finite.

    Raises:
        ValueError: it is not JSON, or has integers of thousands of digits.
        RecursionError: it is nested too deep.
    """
    return json.loads(text, parse_constant=_refused, parse_float=_finite)


def decode(body: bytes) -> dict[str, Any]:
    """The object in the body of a frame, with valid UTF-8 in all its strings, and with finite numbers.

    Raises:
        ValueError: it is not a JSON object, or is nested too deep.
    """
    try:
        # Given bytes, `json` would let half characters pass.
        value = loads(body.decode())
        if b"\\u" in body:
            # An escape may stand for a lone surrogate, with which later code could do nothing.
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    if body.count(b"[") + body.count(b"{") > MAX_LEVELS and depth(value) > MAX_LEVELS:
        raise ValueError(f"JSON of more than {MAX_LEVELS} levels")
    return value


def heard(body: bytes) -> dict[str, Any]:
    """The same of text that anyone may have written, as an engine reads it.

    Raises:
        ValueError: as `decode`, or there is more of it than an engine reads.
    """
    if len(body) > MAX_HEARD:
        raise ValueError(f"{len(body):,} bytes, more than {MAX_HEARD:,}")
    if _values(body) > MAX_VALUES and _values(_without_texts(body)) > MAX_VALUES:
        raise ValueError(f"JSON of more than {MAX_VALUES:,} values")
    return decode(body)


def _values(body: bytes) -> int:
    """No fewer than the values in JSON, which are counted before they are made."""
    return sum(map(body.count, (b"[", b"{", b",")))


def _without_texts(body: bytes) -> bytes:
    """JSON with empty texts."""
    return b'""'.join(body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text:.40} is more than a number can be")
    return number


def length_of(header: bytes, most: int = MAX_FRAME) -> int:
    """The length of the body behind a header.

    Raises:
        ValueError: it is longer than `most`.
    """
    (length,) = HEADER.unpack(header)
    if length > most:
        raise ValueError(f"a frame of {length:,} bytes, more than {most:,}")
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
