"""Removes a folder that hostile code has written to."""

import os
import stat

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove(path: str) -> None:
    """Removes the folder `path` and all in it, however deep and whatever its modes; nothing where there is none.

    No link is followed, and depth costs neither stack nor long paths.
    """
    try:
        here = os.open(path, _FOLDER)
    except FileNotFoundError:
        return
    above: list[tuple[str, list[str]]] = []  # of each folder on the way: its name, and the names left beside it
    names = os.listdir(here)
    while names or above:
        if not names:
            name, names = above.pop()
            here = _go(here, "..")
            os.rmdir(name, dir_fd=here)
            continue
        name = names.pop()
        mode = os.lstat(name, dir_fd=here).st_mode
        if not stat.S_ISDIR(mode):
            os.unlink(name, dir_fd=here)
            continue
        if mode & 0o700 != 0o700:
            os.chmod(name, 0o700, dir_fd=here)
        above.append((name, names))
        here = _go(here, name)
        names = os.listdir(here)
    os.close(here)
    os.rmdir(path)


def _go(fd: int, name: str) -> int:
    there = os.open(name, _FOLDER, dir_fd=fd)
    os.close(fd)
    return there
