"""Reading of HTTP request bodies, which any client may write, so that none of them blocks the event loop."""

import asyncio
import zlib
from typing import Any

from aiohttp import web

from pipeline.agent.endpoint.refused import RequestRefused
from pipeline.agent.inside.frames import MAX_HEARD, heard

WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 47}
"""Number of bits of zlib's window (`wbits`) by the encoding of a body."""


async def read(request: web.Request) -> bytes:
    """Read the body of a request and decompress it.

    The HTTP server must not decompress bodies itself: it would do so on the event loop, and without a limit.

    Raises:
        RequestRefused: the body is too long, or is not compressed in the encoding that its header names.
    """
    encoding = request.headers.get("Content-Encoding", "").strip().lower() or "identity"
    if encoding not in WINDOWS and encoding != "identity":
        known = ", ".join(WINDOWS)
        raise RequestRefused(
            f"content-encoding {encoding!r:.40} is not read; send {known}, or no such header", "encoding"
        )
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_long() from None
    return body if encoding == "identity" else await asyncio.to_thread(unpacked, body, WINDOWS[encoding])


def unpacked(body: bytes, window: int) -> bytes:
    """Decompress a body; `window` is an entry of `WINDOWS`.

    Raises:
        RequestRefused: the content is too long, is compressed in another way, or breaks off.
    """
    unpacking = zlib.decompressobj(window)
    try:
        plain = unpacking.decompress(body, MAX_HEARD + 1)
    except zlib.error as error:
        raise RequestRefused(
            f"the body is not packed as its header content-encoding says ({error})", "encoding"
        ) from None
    if len(plain) > MAX_HEARD:
        raise _too_long()
    if not unpacking.eof:
        raise RequestRefused("the body, which is packed, breaks off before its end", "encoding")
    return plain


def _too_long() -> RequestRefused:
    return RequestRefused(f"the body is longer than {MAX_HEARD:,} bytes", "too_large", 413)


def as_json(body: bytes) -> dict[str, Any]:
    """Parse the JSON object in a body. Raises RequestRefused if the body is not a JSON object."""
    try:
        return heard(body)
    except ValueError as error:
        raise RequestRefused(f"the body is {error}", "invalid_json") from None
