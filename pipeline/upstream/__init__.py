"""Private interfaces of Ray, torch, transformers, peft and vLLM. Only this package reads or replaces them.

Each has a guard: if the installed version has another form than the known one, a run continues without it and notes
that, or ends with a sentence that names the version. Each names the upstream issue that would make it unnecessary.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any


def version_of(*packages: str) -> str:
    """Return the name and version of the first of `packages` that is installed."""
    for package in packages:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return packages[0]


def private(owner: Any, name: str, *packages: str) -> Any:
    """Return the attribute `name` of `owner`, a private interface.

    Args:
        owner: module, class or object of the library.
        name: dotted name in it.
        packages: names of the library in the package index.

    Raises:
        ImportError: the installed version does not have it.
    """
    found = owner
    for part in name.split("."):
        if not hasattr(found, part):
            place = getattr(owner, "__name__", type(owner).__name__)
            raise ImportError(
                f"{version_of(*packages)} has no {name} in {place}, which is needed here; install the version of "
                "requirements/"
            )
        found = getattr(found, part)
    return found
