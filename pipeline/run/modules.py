"""Finds the files of the user's code, without running any of it: a file or module that a setting names, and its
imports.

Imports are followed from file to file, in the folder of the named file and in the folders of the user's Python path.
Installed packages and Slipstream itself are not followed. An installed module that a setting names is followed within
its own package.
"""

import ast
import importlib.util
import os
import site
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

OWN = Path(__file__).resolve().parents[2]
"""Folder of Slipstream's source."""
OWN_PACKAGES = ("pipeline", "jobs", "configs")
EXTENSIONS = (".so", ".pyd")


def user_path(*values: str) -> list[Path]:
    """Return the folders from which the run imports the user's modules: the current one, and those in `PYTHONPATH`.

    Args:
        values: further values of `PYTHONPATH`.
    """
    texts = [os.getcwd(), os.environ.get("PYTHONPATH", ""), *values]
    folders = [Path(part).resolve() for text in texts for part in text.split(os.pathsep) if part]
    return [folder for folder in dict.fromkeys(folders) if not _installed(folder)]


def files_of(named: str, path: Sequence[Path]) -> list[tuple[str, Path]]:
    """List a Python file or dotted module and all that it imports, as (path relative to its root folder, file).

    Args:
        named: `/code/my_reward.py` or `package.module`.
        path: folders of the user's modules.
    """
    if named.endswith(".py"):
        file = Path(named).expanduser().absolute()
        roots = [file.parent, *path]
        begin = [(file, file.parent)] if file.is_file() else []
    else:
        parts = named.split(".")
        roots = [*path]
        begin = _resolved(parts, roots)
        if not begin and parts[0] not in OWN_PACKAGES and (root := _installation(parts[0])):
            roots = [root]
            begin = _resolved(parts, roots)
    return [(file.relative_to(root).as_posix(), file) for file, root in _closure(begin, roots)]


def _closure(begin: list[tuple[Path, Path]], roots: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """Yield (file, root folder) of `begin` and of all files that they import, directly or not, each file once.

    Args:
        begin: the first files, each with the folder from which it is imported.
        roots: folders in which imports are looked up.
    """
    waiting, seen = list(begin), set[Path]()
    while waiting:
        file, root = waiting.pop(0)
        if file.resolve() in seen:
            continue
        seen.add(file.resolve())
        yield file, root
        if file.suffix == ".py":
            package = list(file.relative_to(root).parts[:-1])
            for parts in _imports(file, package):
                waiting += _resolved(parts, roots, within=package[0] if _installed(root) and package else None)


def _imports(file: Path, package: list[str]) -> Iterator[list[str]]:
    """Yield the dotted names that a file imports, split at the dots; the last part may be a name within a module."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        # Python will report it when it imports the file.
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            yield from ([*base, alias.name] for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value.split(".")


def _resolved(parts: list[str], roots: Sequence[Path], within: str | None = None) -> list[tuple[Path, Path]]:
    """List the files that importing a dotted name runs: its parent packages and the module, each as (file, root
    folder).

    Args:
        parts: the dotted name, split at the dots.
        roots: folders in which the name is looked up; the first that has it counts.
        within: name of the only package to look into; None for any.
    """
    if not parts or (within is not None and parts[0] != within):
        return []
    for root in roots:
        if root == OWN and parts[0] in OWN_PACKAGES:
            continue
        found, folder = [], root
        for part in parts:
            package = folder / part / "__init__.py"
            if package.is_file():
                found.append(package)
            elif modules := _modules(folder, part):
                found += modules
                break
            folder /= part
        if found:
            return [(file, root) for file in found]
    return []


def _modules(folder: Path, name: str) -> list[Path]:
    """Find the files of the module `name` in `folder`, Python or compiled."""
    if not name.isidentifier():
        return []
    if (module := folder / f"{name}.py").is_file():
        return [module]
    return sorted(file for file in folder.glob(f"{name}.*") if file.suffix in EXTENSIONS)


def _installation(top: str) -> Path | None:
    """Return the folder that contains an installed package or module; None if it is not installed, or has no file."""
    try:
        # The spec of a name without a dot is found without importing anything.
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = [Path(place) for place in spec.submodule_search_locations or []]
    if not places and spec.has_location and spec.origin:
        places = [Path(spec.origin)]
    return places[0].resolve().parent if places else None


def _installed(folder: Path) -> bool:
    """Return True if a folder contains installed packages or the standard library."""
    paths = sysconfig.get_paths()
    places = [*(paths[name] for name in ("purelib", "platlib", "stdlib", "platstdlib")), *site.getsitepackages()]
    resolved = {Path(place).resolve() for place in [*places, site.getusersitepackages()]}
    return folder.resolve() in resolved or folder.name in ("site-packages", "dist-packages")
