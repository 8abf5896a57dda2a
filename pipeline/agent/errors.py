"""Exceptions for failed episodes, raised in the run's process."""

from pipeline.agent.inside import frames


class EpisodeFailed(Exception):
    """The environment, a tool or the program failed, and so the row fails.

    The message is the row's error, cut to `MAX_REASON` characters.
    """

    def __init__(self, words: str) -> None:
        super().__init__(frames.cut(words, frames.MAX_REASON))


class EpisodeLost(EpisodeFailed):
    """The zygote or the host of the episode's process has ended, through no fault of the episode."""


class CommandFailed(EpisodeFailed):
    """The command, or the program with its own client, that drives an episode failed."""


class PolicyMistake(Exception):
    """A tool could not carry out the model's call; the model reads the message."""
