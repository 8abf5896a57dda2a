"""Servers that reply to episodes: of tools (`mcp_client.py`), and of an environment (`openenv.py`).

Needs Python 3.9 and nothing but the standard library; it runs in environment processes.
"""

from __future__ import annotations

import re

MCP, OPENENV = "mcp:", "openenv:"
"""What `agent.tools` and `agent.environment` begin with where they name a server."""


class ServerFailed(Exception):
    """A server does not answer, broke off, or sent what is no answer: an error of the row."""


def cause(error: BaseException) -> str:
    """An exception in words; of a group, its first one."""
    while getattr(error, "exceptions", None):
        error = error.exceptions[0]  # type: ignore[attr-defined]
    text = str(error)
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__


def without_login(text: str) -> str:
    """`text` without the names and passwords in URLs."""
    return re.sub(r"//[^/@\s]*@", "//", text)
