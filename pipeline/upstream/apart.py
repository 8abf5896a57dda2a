"""Starts Ray's processes in separate sessions, so that a signal to the driver's process group reaches only the driver.

`timeout`, batch systems and terminals signal a whole process group. Ray 2.60 starts its processes in the driver's
group. Its GCS process ends at once at SIGTERM, so the driver could not save any more. `start_ray_process` of
ray/_private/services.py has no setting for this (we know of no upstream issue), so the class that starts processes is
replaced while Ray starts. Ray's processes still end with the driver, by `PR_SET_PDEATHSIG`. If another version of Ray
lacks the class, its processes stay in the driver's group, and a warning is printed.

`ray.init` also replaces the handler of SIGTERM: in Python by one that exits without saving, and in Ray's C++ by one
that prints a trace and aborts. Both are undone here: https://github.com/ray-project/ray/issues/17308,
https://github.com/ray-project/ray/pull/64830.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import ray._private.services as services
import ray._private.utils as utils

from pipeline.upstream import private

CLASS, HANDLER = "ConsolePopen", "set_sigterm_handler"
VITAL = ("gcs_server", "raylet")

processes: list[subprocess.Popen[Any]] = []
"""Ray's processes (GCS, raylet, ...) that this process has started."""


def _own_session(*args: Any, **kwargs: Any) -> subprocess.Popen[Any]:
    processes.append(subprocess.Popen(*args, **kwargs, start_new_session=True))
    return processes[-1]


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Let a `ray.init` within the block start Ray's processes in sessions of their own, and leave this process's
    handler of SIGTERM as it was."""
    processes.clear()
    replaced: dict[tuple[Any, str], Any] = {(services, CLASS): _own_session, (utils, HANDLER): lambda handler: None}
    before = {(module, name): getattr(module, name, None) for module, name in replaced}
    if None in before.values():
        print("this version of Ray ends with the first signal to the run's process group", file=sys.stderr)
        yield
        return
    for (module, name), value in replaced.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)
        if threading.current_thread() is threading.main_thread():
            # Python does not know that its handler was replaced.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def end() -> None:
    """Kill all of Ray's processes that were started here, workers included, for example after a failed start."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    processes.clear()


def dead() -> str | None:
    """Return the name of one of Ray's programs in `VITAL` that has ended; None if all run."""
    for process in processes:
        program = os.path.basename(str(process.args[0])) if isinstance(process.args, list) else ""
        if program in VITAL and process.poll() is not None:
            return program
    return None


def canonical(address: str) -> str:
    """Return the address of a Ray cluster, such as `auto` or `local`, as `host:port`.

    Ray has no public function for this, and we know of no upstream issue (`canonicalize_bootstrap_address`).

    Raises:
        ImportError: this Ray has no such function.
    """
    resolved: str = private(services, "canonicalize_bootstrap_address", "ray")(address)
    return resolved
