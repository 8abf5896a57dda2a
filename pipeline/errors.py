"""Errors by their remedy, and errors of other libraries as one sentence."""

import difflib
import textwrap
from collections.abc import Iterable


class FinalError(RuntimeError):
    """An error that a restart from the last checkpoint would only repeat. The run ends at once, even if
    `trainer.max_failures` allows restarts."""


class PeerDied(ConnectionError):
    """Another process of the run cannot be reached, most likely because it has died; a restart helps."""


class NotStarted(RuntimeError):
    """Ray did not start or could not be joined; the message has the reason and a remedy. Nothing has been changed."""


def short_reason(error: BaseException) -> str:
    """Return the message of another library's exception on one line, without its endless tail."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...").rstrip(". ")


def nearest(name: str, names: Iterable[str]) -> str:
    """` (the nearest is 'x')` if one of `names` is close to `name`, or is the same without a part before a slash."""
    names = list(names)
    ends = [other for other in names if other.rpartition("/")[2].lower() == name.rpartition("/")[2].lower()]
    close = ends or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" (the nearest is {close[0]!r})" if close else ""
