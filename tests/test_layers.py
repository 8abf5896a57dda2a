"""Imports between the packages of `pipeline/` and `jobs/`, and between their files, form no cycle."""

import ast
import subprocess
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def modules() -> dict[str, Path]:
    """Every module of the library by its dotted name."""
    paths = [*ROOT.glob("pipeline/**/*.py"), *ROOT.glob("jobs/**/*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imported(node: ast.AST) -> set[str]:
    """Dotted names that the code under `node` imports when it runs; imports for the type checker alone are left out."""
    names: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.Import):
            names |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom) and child.module:
            names |= {child.module, *(f"{child.module}.{alias.name}" for alias in child.names)}
        names |= imported(child)
    return names


def package(module: str, path: Path) -> str:
    """The package of a module; a module of the top level stands for itself."""
    if path.name == "__init__.py" or module.count(".") == 1:
        return module
    return module.rpartition(".")[0]


def arrows() -> dict[str, dict[str, list[str]]]:
    """Per package the packages that it imports, each with the lines `module -> module`."""
    known = modules()
    result: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module, path in known.items():
        for name in imported(ast.parse(path.read_text())) & known.keys() - {"pipeline", "jobs"}:
            source, target = package(module, path), package(name, known[name])
            if source != target:
                result[source][target].append(f"{module} -> {name}")
    return result


def test_packages_form_no_cycle() -> None:
    list(TopologicalSorter({source: list(targets) for source, targets in arrows().items()}).static_order())


def test_files_form_no_cycle() -> None:
    """Imports for the type checker count, too; `from package import module` is an import of the module."""
    known: dict[str, Path] = modules()
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        graph[module] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names} & known.keys()
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                graph[module] |= {name if name in known else node.module for name in names} & known.keys()
    list(TopologicalSorter(graph).static_order())


def test_settings_import_no_other_package_and_nothing_heavy() -> None:
    assert set(arrows()["pipeline.config"]) <= {"pipeline.imports"}, "which needs the standard library alone"
    for module, path in modules().items():
        if module.startswith("pipeline.config"):
            top = {name.split(".")[0] for name in imported(ast.parse(path.read_text()))}
            assert not top & {"torch", "ray", "vllm", "transformers", "mlflow"}, module


def test_stages_are_planned_without_torch() -> None:
    """Ray's controller, managers and coordinators import the classes of all stages, one process after the other."""
    encoders = (f"pipeline.supervised.{name}_data" for name in ("sft", "dpo", "preference"))
    planned = ", ".join(["pipeline.stream", *encoders])
    code = f"import sys, {planned}; print(sys.modules.keys() & {{'torch', 'transformers', 'vllm', 'mlflow'}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_no_file_holds_more_than_400_lines() -> None:
    long = {module: count for module, path in modules().items() if (count := len(path.read_text().splitlines())) > 400}
    assert not long


def test_no_two_classes_have_one_name() -> None:
    """One name is one thing, apart from private classes."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    twice = {name: found for name, found in places.items() if len(set(found)) > 1}
    assert not twice
