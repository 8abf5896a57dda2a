"""Checks of the free disk space for a checkpoint, which is written in one folder and copied to another."""

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


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
