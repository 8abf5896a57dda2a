"""Uses of private interfaces of Ray, torch, transformers, peft and vLLM. No other package reads or replaces these.

Each use is guarded: if the installed version of the library has another interface than the known one, the run continues
without it and says so in a note, or ends with an error that names the version. Each use names the upstream issue whose
solution would make it unnecessary, if there is one.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any


def version_of(*packages: str) -> str:
    """Return name and version, such as "ray 2.60.0", of the first of `packages` that is installed.

    If none is installed, the first name is returned.
    """
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
        name: name of the attribute; it may have dots.
        packages: names under which the library may be installed.

    Raises:
        ImportError: the installed version has no such attribute.
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
