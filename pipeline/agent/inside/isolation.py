"""Isolation of environment processes (`agent.isolation`): Linux namespaces around the zygote and its episodes.

This module needs Python 3.9 and nothing but the standard library. It uses the parts of the sandbox
(`pipeline/reward/sandbox/`).

1. The processes see the system's programs and libraries, the interpreter and its packages, this package, and the
   folders of the user's files, all of them read-only. `/tmp` is in memory and ends with the processes.
2. They see only each other's processes, and have no network.
3. They have no capabilities, and a filter of system calls.

Episodes of one zygote are not isolated from each other. The interpreter itself starts outside.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

from pipeline.agent.inside import load, own_process
from pipeline.reward.sandbox.inside import limits, namespaces

TEMP = 1 << 30
"""Maximum size of `/tmp`, which the episodes of one zygote share, in bytes."""
PROCESSES = 8192
"""Maximum number of processes and threads of one zygote, its episodes included. The kernel does not apply the limit to
user 0."""
ALLOWED = ("setsid", "setpgid")
"""System calls that are allowed here, although the sandbox refuses them. The zygote needs `setsid`, and finds the
processes of an episode even if they leave their process group."""


def enter(settings: dict[str, Any]) -> None:
    """Isolate this process.

    The function returns in a child that is process 1 of its namespaces; the calling process waits for its end.

    Args:
        settings: settings of `main.keep`.

    Raises:
        ValueError: this machine cannot isolate processes, or too much would be visible.
    """
    folders = shown(settings)
    try:
        # This is possible neither without privileges nor inside.
        own_process.first_to_go()
        os.umask(0o022)
        uid = namespaces.enter([(folder, folder) for folder in folders], TEMP, os.getcwd())
        # The owner of a file that was opened outside can change its mode.
        own_process.silence(0, 1)
        if uid is not None:
            limits.change_user(uid)
        most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        most = PROCESSES if most == resource.RLIM_INFINITY else min(most, PROCESSES)
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        limits.drop_privileges()
        limits.filter_calls(None, ALLOWED)
    except OSError as error:
        raise ValueError(
            f"agent.isolation is {settings['isolation']}, but this machine cannot isolate environments "
            f"({error}). Allow user namespaces (sysctl user.max_user_namespaces, or the container's "
            "seccomp profile and an unmasked /proc), or set agent.isolation=none: environments can then read all files "
            "that this user may"
        ) from None


def shown(settings: dict[str, Any]) -> list[str]:
    """List the folders and files that the processes can see in addition to the system's.

    Args:
        settings: settings of `main.keep`.

    Raises:
        ValueError: the home folder or `/tmp` would be among them.
    """
    interpreter = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    wanted = [sys.prefix, sys.base_prefix, os.path.dirname(interpreter), settings["package"]]
    wanted += load.folders(**settings["code"])
    kept = [settings["home"], namespaces.WORK]
    for folder in wanted:
        for one in kept:
            if _is_below(os.path.realpath(one), os.path.realpath(folder)):
                raise ValueError(
                    f"agent.isolation would show environments the folder {folder}, which holds {one}; put the files "
                    "of environment, tools and program into a folder of their own"
                )
    # The current folder is often the run's folder, with checkpoints and logs.
    kept = [os.path.realpath(one) for one in (*kept, os.getcwd())]
    path = [os.path.abspath(entry) for entry in sys.path if os.path.exists(entry)]
    wanted += [entry for entry in path if not any(_is_below(one, os.path.realpath(entry)) for one in kept)]
    found: list[str] = []
    # A link is followed inside, so that both ends of it must be there.
    for folder in sorted({*wanted, *map(os.path.realpath, wanted)}):
        if not any(_is_below(folder, above) for above in (*namespaces.SYSTEM, *found)):
            found.append(folder)
    return found


def _is_below(path: str, folder: str) -> bool:
    """Return True if a path is the folder itself or below it; links are not followed."""
    return os.path.commonpath((path, folder)) == os.path.abspath(folder)
