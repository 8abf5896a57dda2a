r"""The last `\boxed{...}` of a response, found without reading more than a bounded part of it."""

import re

MAX_LENGTH = 2000  # characters of a box
MAX_BOXES = 20  # boxes looked at, from the last one back

_COMMAND = re.compile(r"\\(?:boxed|fbox)\s{0,10}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[^\s{}$\\]{1,100}")


def last_boxed(text: str) -> str | None:
    r"""Content of the last box (`\boxed{...}`, `\fbox{...}` or `\boxed 5`) that is closed, or None where there is none.

    A box of more than `MAX_LENGTH` characters is passed over; at most `MAX_BOXES` are tried.
    """
    end = len(text)
    for _ in range(MAX_BOXES):
        start = max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))
        if start < 0:
            return None
        content = _content(text, start)
        if content is not None:
            return content
        end = start
    return None


def _content(text: str, start: int) -> str | None:
    command = _COMMAND.match(text, start)
    if command is None:
        return None
    opening = command.end()
    if not text.startswith("{", opening):
        bare = _BARE.match(text, opening)
        return None if bare is None else bare[0].rstrip(".,;")
    depth = 0
    for brace in _BRACE.finditer(text, opening, opening + MAX_LENGTH + 2):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return text[opening + 1 : brace.start()].strip()
    return None
