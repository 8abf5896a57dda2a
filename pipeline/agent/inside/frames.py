"""Frames between a run and the processes of its episodes: 4 bytes of length, then JSON in UTF-8.

This module needs Python 3.9 and nothing but the standard library. Frames are JSON, which is data and not code, because
an untrusted process may write them. An engine reads further untrusted input: bodies of requests, and texts of errors.
The limits of this module hold for all of it, so that no input blocks the engine's event loop and other episodes.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from typing import Any, NoReturn

MAX_FRAME = 16 << 20
"""Maximum size of a frame to a process, such as a row, in bytes."""
MAX_HEARD = 4 << 20
"""Maximum size of one JSON text that an engine reads, such as a frame of a process or the body of a request, in
bytes."""
MAX_VALUES = 100_000
"""Maximum number of values in such a JSON text."""
MAX_LEVELS = 100
"""Maximum depth of nested lists and objects. Python's own limit is 1,000 calls, and callers have used some."""
MAX_MESSAGES = 4096
"""Maximum number of messages in a conversation that an engine reads."""
MAX_TOOLS = 256
"""Maximum number of tools of a server or a program."""
MAX_TEXT = 1 << 20
"""Maximum length of one text that a process sends for the policy, in characters."""
MAX_REASON = 2000
"""Maximum length of the reason of a failure, in characters."""
HEADER = struct.Struct(">I")
_LEFT_OUT = "\n[... {:,} characters are left out ...]\n"
_READ = 1 << 16


def text_of(error: BaseException) -> str:
    """Return the message of an exception; "" if `str` fails on it."""
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
    """Return the depth of nested lists and dicts; 0 for a value that is neither."""
    levels, level = 0, [value]
    while level := [entry for entry in level if isinstance(entry, (dict, list))]:
        levels += 1
        level = [
            entry for container in level for entry in (container.values() if isinstance(container, dict) else container)
        ]
    return levels


def encode(value: Any, most: int = MAX_FRAME) -> bytes:
    """Encode a value as a frame. NumPy values are replaced by the result of `tolist`, lone surrogates by question
    marks.

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
    """Parse JSON in which all numbers must be finite.

    Raises:
        ValueError: the text is not JSON, has a number that is not finite, or has integers of thousands of digits.
        RecursionError: the JSON is nested too deep.
    """
    return json.loads(text, parse_constant=_refused, parse_float=_finite)


def decode(body: bytes) -> dict[str, Any]:
    """Parse the JSON object in the body of a frame; all its strings are valid UTF-8, and its numbers finite.

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
    """Parse the JSON object in untrusted input, within the limits for an engine.

    Raises:
        ValueError: the input is not a JSON object, is nested too deep, or is longer or has more values than an engine
            reads.
    """
    if len(body) > MAX_HEARD:
        raise ValueError(f"{len(body):,} bytes, more than {MAX_HEARD:,}")
    if _values(body) > MAX_VALUES and _values(_without_texts(body)) > MAX_VALUES:
        raise ValueError(f"JSON of more than {MAX_VALUES:,} values")
    return decode(body)


def _values(body: bytes) -> int:
    """Return an upper bound of the number of values in JSON, without parsing it."""
    return sum(map(body.count, (b"[", b"{", b",")))


def _without_texts(body: bytes) -> bytes:
    """Return JSON with all strings replaced by empty ones."""
    return b'""'.join(body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text:.40} is more than a number can be")
    return number


def length_of(header: bytes, most: int = MAX_FRAME) -> int:
    """Return the length, in bytes, of the body that a header announces.

    Raises:
        ValueError: the body is longer than `most` bytes.
    """
    (length,) = HEADER.unpack(header)
    if length > most:
        raise ValueError(f"a frame of {length:,} bytes, more than {most:,}")
    return int(length)


def read(connection: socket.socket, header: bytes = b"") -> dict[str, Any] | None:
    """Read the next frame from a blocking socket. Returns None if the other end is closed.

    Args:
        connection: the socket.
        header: beginning of the frame's header, if it has been read.

    Raises:
        OSError: the connection broke.
        ValueError: the frame is too long, or its body is not a JSON object.
    """
    header += _exactly(connection, HEADER.size - len(header))
    if len(header) < HEADER.size:
        return None
    return decode(_exactly(connection, length_of(header)))


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Read `count` bytes, or fewer if the other end is closed."""
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), _READ))
        if not part:
            break
        data += part
    return bytes(data)
