"""Errors by what can be done about them, and errors of other libraries in a sentence."""

import textwrap


class FinalError(RuntimeError):
    """What a restart from the last checkpoint would only meet again; the run ends at once, whatever
    `trainer.max_failures` says."""


class PeerDied(ConnectionError):
    """Another process of the run cannot be reached, most likely because it has died; a restart helps."""


def short_reason(error: Exception) -> str:
    """What an exception of another library says, on one line and without its endless tail."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...").rstrip(". ")
