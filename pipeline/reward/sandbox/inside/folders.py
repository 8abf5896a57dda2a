"""Removes a folder that hostile code has written to."""

import os


def remove(path: str) -> None:
    """Remove the folder `path`, however deep and whatever its modes; no link is followed."""
    # Complaints name the paths, as long and as many as the code liked.
    silent = [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
    for command in (["rm", "-rf"], ["chmod", "-Rf", "u+rwx"], ["rm", "-rf"]):
        if os.path.isdir(path):
            os.waitpid(os.posix_spawnp(command[0], [*command, path], os.environ, file_actions=silent), 0)
