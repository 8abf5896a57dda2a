"""Removes a folder that hostile code has written to."""

import os


def remove(path: str) -> None:
    """Remove the folder `path`, however deep and whatever its modes; no link is followed."""
    for command in (["rm", "-rf"], ["chmod", "-Rf", "u+rwx"], ["rm", "-rf"]):
        if os.path.isdir(path):
            os.spawnvp(os.P_WAIT, command[0], [*command, path])
