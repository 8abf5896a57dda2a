"""Remove a folder that hostile code has written to."""

import os


def remove(path: str) -> None:
    """Remove the folder `path` with all of its content, whatever its depth and file modes. Links are not followed."""
    # Error messages name the paths, whose length and number the code has chosen.
    silent = [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
    for command in (["rm", "-rf"], ["chmod", "-Rf", "u+rwx"], ["rm", "-rf"]):
        if os.path.isdir(path):
            os.waitpid(os.posix_spawnp(command[0], [*command, path], os.environ, file_actions=silent), 0)
