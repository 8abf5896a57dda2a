"""A separate virtual environment with TRL, since TRL and this project pin different sets of packages.

It has the versions of torch and transformers that run here, so that both sides compute with the same kernels.
"""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

SERIES = "1.16"
ASK = "import json, sys; from importlib.metadata import version; print(json.dumps([version(n) for n in sys.argv[1:]]))"
SAME = ("torch", "transformers")
"""Packages that must have this environment's version."""


def release(version: str) -> str:
    """Return a version without the kind of build: `2.13.0` of `2.13.0+cpu`."""
    return version.partition("+")[0]


def versions(python: Path) -> dict[str, str]:
    """Read the versions of TRL and of `SAME` in the environment of an interpreter; empty if one is missing."""
    names = ["trl", *SAME]
    command = [str(python), "-c", ASK, *names]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(names, json.loads(answer), strict=True))


def complaint(found: dict[str, str]) -> str | None:
    """Return the reason if an environment with these versions cannot be used; else None."""
    if not found:
        return f"it lacks one of trl, {', '.join(SAME)}"
    if not f"{found['trl']}.".startswith(f"{SERIES}."):
        return f"it has TRL {found['trl']}, not {SERIES}"
    for name in SAME:
        here = metadata.version(name)
        if release(found[name]) != release(here):
            return f"it has {name} {found[name]}, and {release(here)} runs here"
    return None


def check(python: Path) -> None:
    """Check that a given interpreter has the needed packages.

    Raises:
        ValueError: a package is missing or has another version.
    """
    if wrong := complaint(versions(python)):
        raise ValueError(f"{python} cannot run TRL's side: {wrong}; leave --trl-python out to have an environment made")


def make(folder: Path) -> Path:
    """Return the interpreter of an environment in `folder`; make the environment if it is missing or does not fit.

    Raises:
        subprocess.CalledProcessError: pip could not install the packages.
        ValueError: the installed versions do not fit.
    """
    python = folder / "bin" / "python"
    if complaint(versions(python)) is None:
        return python
    print(f"installing TRL {SERIES} into {folder} (minutes)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    torch, transformers = (release(metadata.version(name)) for name in SAME)
    others = [f"trl=={SERIES}.*", f"transformers=={transformers}"]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *others]
    # Ordinary indices have no CPU build; the other one computes on a CPU as well, and is only larger.
    if subprocess.run([*pip, f"torch=={torch}+cpu"], stderr=subprocess.DEVNULL).returncode:
        subprocess.run([*pip, f"torch=={torch}"], check=True)
    check(python)
    return python
