"""Prepare a sandbox: the command that starts it, the folders that are visible inside, and the job (its settings)."""

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox.inside import namespaces

PACKAGE = Path(__file__).parent  # holds `inside`
START = f"import sys; sys.path.append({str(PACKAGE)!r}); from inside.supervisor import main; "


class SandboxError(Exception):
    """The sandbox itself failed, not the code in it, so the reward is not known."""


def interpreter() -> str:
    """Return the path of the Python interpreter for the code: the one of this process, outside of virtual
    environments."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def command(job: int) -> list[str]:
    """Return the command line of the supervisor, which reads its job from the file descriptor `job`."""
    return [interpreter(), "-I", "-S", "-c", f"{START}main({job})"]


def packages(config: SandboxConfig) -> list[tuple[str, str]]:
    """Return the folders of installed packages that the code may import, as (path outside, path inside)."""
    if not config.packages:
        return []
    paths = dict.fromkeys(os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    # They get another place: Ray keeps its virtual environments below /tmp, the place of the work folder.
    return [(path, f"{namespaces.HERE}/packages{i}") for i, path in enumerate(paths) if os.path.isdir(path)]


def mounts(config: SandboxConfig) -> list[tuple[str, str]]:
    """Return the folders to show inside in addition to the system's, as (path outside, path inside): Python, installed
    packages, and the code in `inside/`."""
    shown = [(str(PACKAGE / "inside"), f"{namespaces.HERE}/inside"), *packages(config)]
    for path in (os.path.realpath(sys.base_prefix), os.path.dirname(interpreter())):
        above = [*namespaces.SYSTEM, *(target for _, target in shown)]
        if not any(Path(path).is_relative_to(folder) for folder in above):
            shown.append((path, path))
    return shown


def job(code: str, tests: list[dict[str, Any]], work: str, streams: list[int], config: SandboxConfig) -> dict[str, Any]:
    """Return the job of the supervisor, as JSON data.

    Args:
        code: the program.
        tests: the tests, see `runner.run_tests`.
        work: work folder with `isolation=none`; "" with namespaces.
        streams: file descriptors for stdout, stderr and the results of calls.
        config: the section `reward.sandbox`.
    """
    bare = bool(work)
    return {
        "streams": streams,
        "namespaces": not bare,
        "code": code,
        "tests": tests,
        "python": interpreter(),
        "packages": [outside if bare else inside for outside, inside in packages(config)],
        "mounts": mounts(config),
        "here": str(PACKAGE) if bare else namespaces.HERE,
        "work": work or namespaces.WORK,
        "temp": config.temp_mb << 20,
        "output": config.output_kb << 10,
        "test_s": config.timeout_s,
        "total_s": config.total_timeout_s,
        # Without a user namespace the kernel counts all processes of this user, so the runner counts the sandbox's
        # processes. In a user namespace, the supervisor and the process outside of it count as well.
        "processes": None if bare else config.max_processes + 2,
        "limits": {"cpu_s": config.cpu_s, "memory": config.memory_mb << 20, "file": config.file_mb << 20},
    }
