"""Whether a test holds, where that may be unknown."""

Status = bool | None
"""Whether a test holds or a command succeeds; None where the text does not tell."""

COMPARISONS = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-lt": int.__lt__,
    "-le": int.__le__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
}


def opposite(status: Status) -> Status:
    return None if status is None else not status


def both(first: Status, second: Status) -> Status:
    return False if False in (first, second) else None if None in (first, second) else True


def either(first: Status, second: Status) -> Status:
    return opposite(both(opposite(first), opposite(second)))
