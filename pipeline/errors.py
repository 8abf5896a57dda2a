"""Errors by their remedy, and errors of other libraries as one sentence."""

import difflib
import textwrap
from collections.abc import Iterable


class FinalError(RuntimeError):
    """Error that would return after a restart from the last checkpoint. It ends the run at once, even if
    `trainer.max_failures` allows restarts."""


class PeerDied(ConnectionError):
    """Error of a connection to another process of the run, which most likely has died; a restart helps."""


class NotStarted(RuntimeError):
    """Error of a Ray that did not start or could not be joined. The message has the reason and a remedy. Nothing has
    changed."""


def short_reason(error: BaseException) -> str:
    """Return the message of another library's exception on one line, without its endless tail."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...").rstrip(". ")


def nearest(name: str, names: Iterable[str]) -> str:
    """` (the nearest is 'x')` if one of `names` is close to `name`, or is the same without a part before a slash."""
    names = list(names)
    ends = [other for other in names if other.rpartition("/")[2].lower() == name.rpartition("/")[2].lower()]
    close = ends or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" (the nearest is {close[0]!r})" if close else ""
