"""Common parts of the clients of tool servers (`mcp_client.py`) and environment servers (`openenv.py`).

This module needs Python 3.9 and nothing but the standard library; it runs in environment processes.
"""

from __future__ import annotations

import re

MCP, OPENENV = "mcp:", "openenv:"
"""Prefixes in `agent.tools` and `agent.environment` that mark a server."""


class ServerFailed(Exception):
    """A server does not answer, broke the connection, or sent something that is not an answer. The row fails."""


def cause(error: BaseException) -> str:
    """Describe an exception in up to 500 characters; of an exception group, the first exception."""
    while getattr(error, "exceptions", None):
        error = error.exceptions[0]  # type: ignore[attr-defined]
    text = str(error)
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__


def without_login(text: str) -> str:
    """Remove names and passwords from the URLs in `text`."""
    return re.sub(r"//[^/@\s]*@", "//", text)
