"""Comparison of settings that name files: two values may name the same files after a move, or through a link."""

import os
from glob import glob
from typing import Any

from pipeline.agent.inside.remote import MCP
from pipeline.imports import split


def names(value: Any) -> Any:
    """Replace the absolute paths in a value by their last part (file name, and the text after a colon)."""
    if isinstance(value, dict):
        return {key: names(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [names(inner) for inner in value]
    return " ".join(_name(word) for word in _words(value)) if isinstance(value, str) else value


def same(old: Any, new: Any, compared: bool) -> bool:
    """Return True if two values are equal except for the folders of the files that they name.

    Args:
        old: the value with which a run began.
        new: the value now; both name local files by absolute paths.
        compared: true if fingerprints compare the contents of these files. If not, the files count as moved only if the
            old path no longer exists, and the new path does.
    """
    if names(old) != names(new):
        return False
    before, after = _paths(old), _paths(new)
    return compared or (len(before) == len(after) and all(map(_moved, before, after)))


def _moved(old: str, new: str) -> bool:
    if os.path.realpath(old) == os.path.realpath(new):
        return True
    return not _there(old) and _there(new)


def _paths(value: Any) -> list[str]:
    """Return the absolute paths in a value."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value, key=str)]
    if isinstance(value, list):
        return [path for inner in value for path in _paths(inner)]
    words = _words(value) if isinstance(value, str) else []
    return [split(word)[0] for word in words if os.path.isabs(word)]


def _words(text: str) -> list[str]:
    return text.split() if text.startswith(MCP) else [text]


def _name(word: str) -> str:
    if not os.path.isabs(word):
        return word
    file, name = split(word)
    return os.path.basename(file.rstrip("/")) + (f":{name}" if name else "")


def _there(path: str) -> bool:
    """Return True if a path exists, or if, as a glob, it matches a file."""
    return os.path.exists(path) or bool(glob(path))
