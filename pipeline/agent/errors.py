"""Failures of episodes on the run's side."""

from pipeline.agent import frames


class EpisodeFailed(Exception):
    """The environment or a tool failed, and with it the row; the message is the row's error, cut to `MAX_REASON`."""

    def __init__(self, words: str) -> None:
        super().__init__(frames.cut(words, frames.MAX_REASON))


class EpisodeLost(EpisodeFailed):
    """The process that starts those of episodes has ended, and this one's with it; it is no fault of the episode."""


class CommandFailed(EpisodeFailed):
    """The command that drives an episode ended with an error."""


class PolicyMistake(Exception):
    """A tool could not do what the model asked; the message is for the model."""
