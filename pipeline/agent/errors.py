"""Failures of episodes on the run's side."""

from pipeline.agent.inside import frames


class EpisodeFailed(Exception):
    """The environment, a tool or the program failed, and the row with it.

    The message is the row's error, cut to `MAX_REASON`.
    """

    def __init__(self, words: str) -> None:
        super().__init__(frames.cut(words, frames.MAX_REASON))


class EpisodeLost(EpisodeFailed):
    """The zygote or the host of the episode's process has ended, through no fault of the episode."""


class CommandFailed(EpisodeFailed):
    """The command, or the program with a client, that drives an episode failed."""


class PolicyMistake(Exception):
    """A tool could not fulfil the model's call; the message is for the model."""
