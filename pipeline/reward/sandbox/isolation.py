"""The command that starts a sandbox, for each kind of isolation, and what is visible inside."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from pipeline.reward.sandbox.config import SandboxConfig
from pipeline.reward.sandbox.inside import namespaces

PACKAGE = Path(__file__).parent  # holds `inside`
START = "import sys; sys.path.append({here!r}); from inside.supervisor import main; main()"


class SandboxError(Exception):
    """The sandbox, not the code in it, failed; the reward is not known."""


def interpreter() -> str:
    """The Python that runs the code: this one, outside of any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def packages(config: SandboxConfig) -> list[tuple[str, str]]:
    """Folders (outside, inside) of installed packages that the code may import from."""
    if not config.packages:
        return []
    paths = dict.fromkeys(os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    # Not at their own place: Ray keeps its virtual environments below /tmp, where the work folder will be.
    return [(path, f"{namespaces.HERE}/packages{i}") for i, path in enumerate(paths) if os.path.isdir(path)]


def mounts(config: SandboxConfig) -> list[tuple[str, str]]:
    """Folders (outside, inside) to show beside the system's: Python, its packages, and this package's inner part."""
    shown = [(str(PACKAGE / "inside"), f"{namespaces.HERE}/inside"), *packages(config)]
    for path in (os.path.realpath(sys.base_prefix), os.path.dirname(interpreter())):
        above = [*namespaces.SYSTEM, *(target for _, target in shown)]
        if not any(Path(path).is_relative_to(folder) for folder in above):
            shown.append((path, path))
    return shown


def job(code: str, tests: list[dict[str, Any]], isolation: str, work: str, config: SandboxConfig) -> dict[str, Any]:
    """What the supervisor is told, see `inside/supervisor.py`."""
    processes: int | None = config.max_processes + 3  # the supervisor and the judge count as well
    if isolation == "none":
        # Without a user namespace the kernel counts all processes of this user; the runner counts these.
        processes = None
    return {
        "isolation": isolation,
        "code": code,
        "tests": tests,
        "python": interpreter(),
        "packages": [pair[isolation != "none"] for pair in packages(config)],
        "mounts": mounts(config),
        "here": str(PACKAGE) if isolation == "none" else namespaces.HERE,
        "work": work if isolation == "none" else namespaces.WORK,
        "temp": config.temp_mb << 20,
        "output": config.output_kb << 10,
        "test_s": config.timeout_s,
        "total_s": config.total_timeout_s,
        "processes": processes,
        "limits": {"cpu_s": config.cpu_s, "memory": config.memory_mb << 20, "file": config.file_mb << 20},
    }


def command(isolation: str, config: SandboxConfig) -> list[str]:
    """Command line of the supervisor under `isolation`, which is not `auto`.

    Raises:
        SandboxError: bubblewrap is asked for and not installed.
    """
    inside = isolation == "bubblewrap"
    here = namespaces.HERE if inside else str(PACKAGE)
    start = [interpreter(), "-I", "-S", "-c", START.format(here=here)]
    return bubblewrap(config) + start if inside else start


def bubblewrap(config: SandboxConfig) -> list[str]:
    """The bwrap part of the command: the same file system and namespaces as `inside/namespaces.py` makes.

    Raises:
        SandboxError: there is no bwrap on the PATH.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(
            "reward.sandbox.isolation is bubblewrap, but there is no program bwrap on the PATH; install bubblewrap "
            "(0.7 or newer) or use isolation=namespaces"
        )
    line = [program, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    line += ["--unshare-cgroup-try", "--uid", str(namespaces.NOBODY), "--gid", str(namespaces.NOBODY)]
    line += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    for path in namespaces.SYSTEM:
        if os.path.islink(path) and os.path.isdir(path):
            line += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            line += ["--ro-bind", path, path]
    for source, target in mounts(config):
        line += ["--ro-bind", source, target]
    for device in namespaces.DEVICES:
        line += ["--dev-bind", device, device]
    line += ["--size", str(config.temp_mb << 20), "--tmpfs", namespaces.WORK, "--remount-ro", "/", "--chdir", "/"]
    return line
