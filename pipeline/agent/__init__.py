"""Multi-turn episodes, and the interface of the user's files: `from pipeline.agent import Environment, tool`.

The docstring of `episode.py` lists the steps of an episode. The folders:

    tokens/     prompts, the tokens between two turns, and parsing of turns, by the model's own chat template
    inside/     code that runs in the user's interpreter: environment, tools or program, one process for each episode
    endpoint/   HTTP servers of the policy, for programs that send requests to it
    here        the episode, its two kinds of players, and the run's handles of its process, on this node or on a host

The user's interpreter imports this file too, so it needs Python 3.9 and nothing but the standard library.
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
    ToolResult,
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
    "ToolResult",
    "tool",
]
