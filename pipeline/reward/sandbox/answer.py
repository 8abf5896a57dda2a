"""Finds the program in a response."""

import re

MAX_CODE = 100_000  # characters of a program

# A line that opens or closes a fence; the language must be Python's or missing.
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+.-]*)[ \t]*\r?$", re.MULTILINE)
_PYTHON = ("python", "python3", "py")
_OPEN, _CLOSE = "<code>", "</code>"


def extract_code(response: str) -> str | None:
    """The last ```python block; without one, the last closed `<code>`; without that, the last block of no language.

    A ```python block that is not closed reaches to the end of the response. None where there is no program. The time is
    linear in the response's length.
    """
    blocks: list[tuple[str, str]] = []
    language, start = None, 0
    for match in _FENCE.finditer(response):
        if language is None:
            language, start = match[1].lower(), match.end() + 1
        elif match[1]:
            # A fence with a language inside an open block: that block was never closed.
            language, start = match[1].lower(), match.end() + 1
        else:
            blocks.append((language, response[start : match.start()]))
            language = None
    if language in _PYTHON:
        blocks.append((str(language), response[start:]))
    python = [text for language, text in blocks if language in _PYTHON]
    if python:
        return python[-1]
    begin = response.rfind(_OPEN, 0, max(response.rfind(_CLOSE), 0))
    if begin >= 0:
        begin += len(_OPEN)
        return response[begin : response.find(_CLOSE, begin)].strip("\r\n")
    plain = [text for language, text in blocks if not language]
    return plain[-1] if plain else None
