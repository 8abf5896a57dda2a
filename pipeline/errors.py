"""Errors that differ in the reaction to them (end the run, restart), and short texts for errors of other libraries."""

import difflib
import textwrap
from collections.abc import Iterable


class FinalError(RuntimeError):
    """Error that would occur again after a restart from the last checkpoint. It ends the run at once, even if
    `trainer.max_failures` allows restarts."""


class EngineDead(RuntimeError):
    """A rollout engine has failed, so it cannot generate any more; another one takes its place."""


class PeerDied(ConnectionError):
    """Lost connection to another process of the run, which most likely has died; a restart of the run helps."""


class NotStarted(RuntimeError):
    """A local Ray did not start, or a Ray cluster could not be joined. The message has the reason and a remedy."""


def short_reason(error: BaseException) -> str:
    """Return type and message of an exception on one line of at most 400 characters."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...").rstrip(". ")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the text ` (the nearest is 'x')` if one of `names` is similar to `name` or equal after its last slash;
    else ""."""
    names = list(names)
    ends = [other for other in names if other.rpartition("/")[2].lower() == name.rpartition("/")[2].lower()]
    close = ends or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" (the nearest is {close[0]!r})" if close else ""
