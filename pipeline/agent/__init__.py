"""Episodes of several turns, and the interface of the user's files: `from pipeline.agent import Environment, tool`.

`episode.py` begins with the flow of an episode. The rooms:

    tokens/     prompts, the tokens between two answers, and reading of answers, by the model's own chat template
    inside/     the code in the user's interpreter: environment, tools or program, one process for each episode
    endpoint/   servers of the policy for programs that request answers
    here        the episode, its two players, and the run's handles of its process, on this node or on a host

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
