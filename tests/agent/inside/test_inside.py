"""The room of the user's interpreter needs Python 3.9 and nothing but its standard library."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOM = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "pipeline/agent/inside").glob("*.py"))
FURTHER = ["pipeline/imports/__init__.py", "pipeline/agent/__init__.py", "pipeline/agent/schema.py"]
FURTHER += [f"pipeline/reward/sandbox/inside/{name}.py" for name in ("__init__", "limits", "namespaces")]
"""Files outside the room that the user's interpreter loads, too."""
PACKAGES = {
    "verl": {"yaml"},
    "openenv": {"websockets"},
    "mcp_client": {"anyio", "httpx2", "mcp", "mcp_types"},
    "mcp_streams": {"anyio", "mcp_types"},
}
"""Packages of the files that are imported only if the settings name a server or a YAML file."""


def imported(tree: ast.AST, package: str = "") -> set[str]:
    """Dotted names of all imports, also of those in functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, (package if node.level else "", node.module)))
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def file_of(name: str) -> str:
    """Path of the module that a dotted name stands for, or is in."""
    for module in (name, name.rpartition(".")[0]):
        path = ROOT / module.replace(".", "/")
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file.relative_to(ROOT).as_posix()
    raise AssertionError(f"{name} is not a module")


@pytest.mark.parametrize("file", ROOM + FURTHER)
def test_a_file_is_python_3_9_and_imports_the_standard_library_or_the_room(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text(), feature_version=(3, 9))
    allowed = sys.stdlib_module_names | PACKAGES.get(Path(file).stem, set())
    for name in imported(tree, Path(file).parent.as_posix().replace("/", ".")):
        if name.startswith("pipeline"):
            assert file_of(name) in ROOM + FURTHER, name
        else:
            assert name.split(".")[0] in allowed, name


def test_files_with_packages_are_imported_only_in_functions() -> None:
    for file in ROOM:
        tree = ast.parse((ROOT / file).read_text())
        first = imported(ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], []))
        stems = {Path(file_of(name)).stem for name in first if name.startswith("pipeline")}
        if Path(file).stem != "mcp_client":
            assert not stems & {"openenv", "mcp_client", "mcp_streams"}, file
        if Path(file).stem == "verl":
            assert "yaml" not in first
