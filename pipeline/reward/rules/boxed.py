r"""The last `\boxed{...}` of a response, found without reading more than a bounded part of it."""

import re

from pipeline.reward.rules import quantity

MAX_LENGTH = 2000  # characters of a box
MAX_BOXES = 20  # boxes looked at, from the last one back

_COMMAND = re.compile(r"\\(?:boxed|fbox)\s{0,10}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[^\s{}$\\]{1,100}")


def last_boxed(text: str) -> str | None:
    r"""Content of the last box (`\boxed{...}`, `\fbox{...}` or `\boxed 5`) that is closed, or None where there is none.

    A box of more than `MAX_LENGTH` characters is passed over; at most `MAX_BOXES` are tried. Of boxes inside each other
    the outermost counts, and is not equal to anything unless it holds nothing but the inner one.
    """
    found = _last(text)
    return None if found is None else found[1]


def unboxed(text: str) -> str:
    """The text with the content of its last box in place of the box."""
    found = _last(text)
    return text if found is None else f"{text[: found[0]]}{found[1]}{text[found[2] :]}"


def _last(text: str) -> tuple[int, str, int] | None:
    """Start, content and end of the last box."""
    found = None
    end = len(text)
    for _ in range(MAX_BOXES):
        start = max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))
        if start < 0:
            break
        box = _content(text, start)
        if box is not None and found is None:
            found = (start, *box)
        elif box is not None and found is not None and box[1] > found[0]:
            inner = text[found[0] : found[2]]
            found = (start, found[1] if box[0] == inner else box[0], box[1])
        end = start
    return found


def _content(text: str, start: int) -> tuple[str, int] | None:
    """Content and end of the box that starts there, or None if it is not closed."""
    command = _COMMAND.match(text, start)
    if command is None:
        return None
    opening = command.end()
    if not text.startswith("{", opening):
        bare = _BARE.match(text, opening)
        if bare is None:
            return None
        behind = text[bare.end() :][: quantity.LONGEST].partition("\n")[0]
        more = behind if bare[0][-1:].isdecimal() and quantity.goes_on(behind) else ""
        return bare[0].rstrip(".,;") + more, bare.end()
    depth = 0
    for brace in _BRACE.finditer(text, opening, opening + MAX_LENGTH + 2):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return text[opening + 1 : brace.start()].strip(), brace.end()
    return None
