"""Errors by their remedy, and errors of other libraries as one sentence."""

import textwrap


class FinalError(RuntimeError):
    """An error that a restart from the last checkpoint would only repeat. The run ends at once, even if
    `trainer.max_failures` allows restarts."""


class PeerDied(ConnectionError):
    """Another process of the run cannot be reached, most likely because it has died; a restart helps."""


class NotStarted(RuntimeError):
    """Ray did not start or could not be joined; the message says why and what to do. Nothing has been changed."""


def short_reason(error: Exception) -> str:
    """What an exception of another library says, on one line and without its endless tail."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...").rstrip(". ")
