"""Checks of the free disk space for a checkpoint, which is written in one folder and copied to another, and the space
that a run takes."""

import contextlib
import os
import shutil
from pathlib import Path

import pyarrow.fs as pafs

from pipeline.storage.filesystem import filesystem_of

STAGING_REMEDY = "make room, or name another folder (trainer.env_vars.TMPDIR)"
STORAGE_REMEDY = "make room, or name another place (trainer.storage_path)"


def lacking(place: str, needed: int, remedy: str) -> str | None:
    """Describe the lack of disk space in a local folder; None if there is enough, or `place` is a URL of another
    storage.

    Args:
        place: the folder, which need not exist.
        needed: number of bytes of a checkpoint.
        remedy: advice for the end of the message.
    """
    filesystem, path = filesystem_of(place)
    if not isinstance(filesystem, pafs.LocalFileSystem):
        return None
    nearest = next(folder for folder in (Path(path), *Path(path).parents) if folder.exists())
    if (free := shutil.disk_usage(nearest).free) >= needed:
        return None
    return f"{place} has {_mib(free)} free, and a checkpoint needs {_mib(needed)} there; {remedy}"


def disk(folder: str) -> int:
    """Return the device number of the disk that a folder is on."""
    return os.stat(folder).st_dev


def used(run_dir: Path) -> str:
    """Describe the disk space that a run's folder takes, in all and by its largest parts."""
    parts = {entry.name: _bytes(entry) for entry in run_dir.iterdir()}
    largest = sorted((size, name) for name, size in parts.items() if size >= 2**20)[:-4:-1]
    listed = ", ".join(f"{name} {_mib(size)}" for size, name in largest)
    return f"{_mib(sum(parts.values()))}{f' ({listed})' if listed else ''}"


def _bytes(place: Path) -> int:
    """Return the number of bytes of a file, or of all files in a folder. Files that disappear meanwhile have none."""
    files = [place] if not place.is_dir() else [path for path in place.rglob("*") if not path.is_dir()]
    total = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            total += file.lstat().st_size
    return total


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
