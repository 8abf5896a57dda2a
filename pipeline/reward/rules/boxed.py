r"""Find the last `\boxed{...}` of a response, and read only a bounded part of the response."""

import re

from pipeline.reward.rules import quantity

MAX_LENGTH = 2000  # maximum number of characters in a box
MAX_BOXES = 20  # maximum number of boxes to look at, from the last one back

_MINUS = re.compile(r"(?<![\w)\]}\u2212-])[-\u2212]\Z")
_COMMAND = re.compile(r"\\(?:boxed|fbox)\s{0,10}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[^\s{}$\\]{1,100}")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed box (`\boxed{...}`, `\fbox{...}` or `\boxed 5`), or None without a box.

    Boxes of more than `MAX_LENGTH` characters are skipped, and at most `MAX_BOXES` are tried. Of nested boxes the
    outermost counts; if it holds only the inner box, the inner content is returned. A minus sign right before the box
    is added to its number, and so is text after the box that continues the number (`\\boxed{42} million`).
    """
    found = _last(text)
    if found is None:
        return None
    start, content, end = found
    if content[:1].isdecimal() and _MINUS.search(text[max(0, start - 2) : start]):
        content = f"-{content}"
    return content + _going_on(content, text, end)


def unboxed(text: str) -> str:
    """Replace the last box of the text by its content."""
    found = _last(text)
    return text if found is None else f"{text[: found[0]]}{found[1]}{text[found[2] :]}"


def _last(text: str) -> tuple[int, str, int] | None:
    """Return (start of the last box in `text`, content, end of the box), or None without a box."""
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
    """Return (content, end) of the box that starts at `start`, or None if the box is not closed."""
    command = _COMMAND.match(text, start)
    if command is None:
        return None
    opening = command.end()
    if not text.startswith("{", opening):
        bare = _BARE.match(text, opening)
        if bare is None:
            return None
        return bare[0].rstrip(".,;"), bare.end()
    depth = 0
    for brace in _BRACE.finditer(text, opening, opening + MAX_LENGTH + 2):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return text[opening + 1 : brace.start()].strip(), brace.end()
    return None


def _going_on(content: str, text: str, end: int) -> str:
    """Return the text after a box that continues the number in the box; empty in most responses.

    Args:
        content: content of the box.
        text: the response.
        end: end of the box in `text`.
    """
    behind = text[end : end + quantity.LONGEST].partition("\n")[0].lstrip("$")
    # Without a blank, any word may follow, since a box separates it from the number.
    parted = f" {behind}" if behind[:1].isalpha() else behind
    return behind if content[-1:].isdecimal() and quantity.goes_on(parted) else ""
