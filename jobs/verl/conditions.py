"""Whether the tests of a bash script hold, where the text tells."""

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

Status = bool | None
"""Whether a test holds or a command succeeds; None where the text does not tell."""

_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-lt": int.__lt__,
    "-le": int.__le__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
}


def holds(words: list[str], unknown: Callable[[str], Sequence[str]]) -> Status:
    """Whether `[ words ]` holds; `unknown` gives the pieces of a word that cannot be known."""
    if words[:1] == ["!"]:
        return opposite(holds(words[1:], unknown))
    if any(unknown(word) for word in words) or "-a" in words or "-o" in words:
        return None
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return bool(words[1]) == (words[0] == "-n")
    if len(words) == 3 and words[1] in ("=", "==", "!="):
        return fits(words[0], words[2], unknown) is (words[1] != "!=")
    if len(words) == 3 and words[1] in _COMPARISONS and all(re.fullmatch(r"-?\d{1,18}", word) for word in words[::2]):
        return _COMPARISONS[words[1]](int(words[0]), int(words[2]))
    return None


def fits(value: str, pattern: str, unknown: Callable[[str], Sequence[str]]) -> Status:
    """Whether a value fits the pattern of a `case`."""
    if unknown(value) or unknown(pattern):
        return True if pattern == "*" else None
    return fnmatchcase(value, pattern)


def opposite(status: Status) -> Status:
    """Whether it does not hold."""
    return None if status is None else not status


def all_of(statuses: list[Status]) -> Status:
    """Whether all hold."""
    return False if False in statuses else None if None in statuses else True


def any_of(statuses: list[Status]) -> Status:
    """Whether one holds at least."""
    return True if True in statuses else None if None in statuses else False
