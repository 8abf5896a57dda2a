"""Extract the program from a response."""

import re

MAX_CODE = 100_000  # characters of a program

_LANGUAGE = re.compile(r"[\w+.-]*")
_PYTHON = ("python", "python3", "py")
_OPEN, _CLOSE = "<code>", "</code>"


def extract_code(response: str) -> str | None:
    """Return the program in a response; None without a program. Takes linear time.

    The program is the last ```python block (which may be left open at the end of the response); else the text in the
    last closed `<code>`; else the last block without a language.
    """
    blocks: list[tuple[str, str]] = []
    language, start, end = None, 0, 0
    for line in response.split("\n"):
        begin, end = end, end + len(line) + 1
        fence = _fence(line)
        if fence is None:
            continue
        if language is None or fence:
            # A fence with a language inside an open block: that block was never closed.
            language, start = fence, end
        else:
            blocks.append((language, response[start:begin]))
            language = None
    if language in _PYTHON:
        blocks.append((language, response[start:]))
    python = [text for name, text in blocks if name in _PYTHON]
    if python:
        return python[-1]
    opened = response.rfind(_OPEN, 0, max(response.rfind(_CLOSE), 0))
    if opened >= 0:
        opened += len(_OPEN)
        return response[opened : response.find(_CLOSE, opened)].strip("\r\n")
    plain = [text for name, text in blocks if not name]
    return plain[-1] if plain else None


def _fence(line: str) -> str | None:
    """Return the language that a line with ``` names, or "" without a name; None for any other line."""
    text = line.removesuffix("\r").strip(" \t")
    if not text.startswith("```"):
        return None
    name = text[3:].strip(" \t")
    return name.lower() if _LANGUAGE.fullmatch(name) else None
