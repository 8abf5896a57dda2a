"""Episodes of several turns, and the interface of the user's files: `from pipeline.agent import Environment, tool`.

The user's interpreter imports this module too, so it needs Python 3.9 and nothing but the standard library.
"""

from pipeline.agent.inside.interface import (
    Call,
    Chat,
    Content,
    Environment,
    EpisodeOver,
    Message,
    Observation,
    ToolError,
    tool,
)

__all__ = [
    "Call",
    "Chat",
    "Content",
    "Environment",
    "EpisodeOver",
    "Message",
    "Observation",
    "ToolError",
    "tool",
]
