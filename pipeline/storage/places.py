"""Whether two values of a setting name the same files, though a project was moved, or is reached by a link."""

import os
from glob import glob
from typing import Any

from pipeline.agent.remote import MCP


def same(old: Any, new: Any, compared: bool) -> bool:
    """Whether two values differ at most in the places of files.

    Args:
        old: the value that a run began with.
        new: the value now; both name local files by absolute paths.
        compared: whether the contents of these files are compared by their fingerprints. If not, the files count as
            moved if nothing is in the old place any more, and a file of the same name is in the new one.
    """
    if isinstance(old, str) and isinstance(new, str):
        words = [text.split() if text.startswith(MCP) else [text] for text in (old, new)]
        return len(words[0]) == len(words[1]) and all(map(_same_word, *words, [compared] * len(words[0])))
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(same(*pair, compared) for pair in zip(old, new, strict=True))
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(same(old[key], new[key], compared) for key in old)
    return bool(old == new)


def _same_word(old: str, new: str, compared: bool) -> bool:
    if old == new:
        return True
    if not (os.path.isabs(old) and os.path.isabs(new)):
        return False
    (old_file, old_name), (new_file, new_name) = _split(old), _split(new)
    if old_name != new_name:
        return False
    if os.path.realpath(old_file) == os.path.realpath(new_file):
        return True
    moved = compared or (not _there(old_file) and _there(new_file))
    return moved and os.path.basename(old_file.rstrip("/")) == os.path.basename(new_file.rstrip("/"))


def _split(word: str) -> tuple[str, str]:
    """The file, and the name behind it in `file.py:Name`."""
    file, colon, name = word.rpartition(":")
    return (file, name) if colon and not os.path.exists(word) else (word, "")


def _there(path: str) -> bool:
    """Whether a file or folder exists, or a glob matches one."""
    return os.path.exists(path) or bool(glob(path))
