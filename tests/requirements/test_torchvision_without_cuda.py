"""The import hook for torchvision's build for CUDA, with stand-ins for torch and its operators."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

FILE = Path(__file__).parents[2] / "requirements" / "torchvision_without_cuda.py"


class Library:
    def __init__(self, *name: str) -> None:
        self.name, self.defined = name, list[str]()
        self.define = self.defined.append


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the hook, imported as a `.pth` file does; its finder is removed at the end."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    spec = importlib.util.spec_from_file_location(FILE.stem, FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, FILE.stem, module)
    spec.loader.exec_module(module)
    return module


def after_the_compiled_part(monkeypatch: pytest.MonkeyPatch, **operators: object) -> None:
    """Look for the module that torchvision imports after its compiled part, which defined `operators`."""
    ops = SimpleNamespace(torchvision=SimpleNamespace(**operators))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(ops=ops, library=SimpleNamespace(Library=Library)))
    for finder in list(sys.meta_path):
        if type(finder).__name__ == "Schemas":
            assert finder.find_spec("torchvision") is None and finder in sys.meta_path
            assert finder.find_spec("torchvision._meta_registrations") is None and finder not in sys.meta_path


def test_the_schemas_are_defined_if_the_compiled_part_did_not_load(hook, monkeypatch) -> None:
    after_the_compiled_part(monkeypatch)
    library = hook.schemas.library
    assert library.name == ("torchvision", "DEF")
    assert [schema.partition("(")[0] for schema in library.defined] == ["nms", "qnms"]


def test_a_build_for_cpus_keeps_its_own_operators(hook, monkeypatch) -> None:
    after_the_compiled_part(monkeypatch, nms=object())
    assert not hasattr(hook, "schemas")


def test_the_tested_set_has_torchvision_for_both_kinds_of_machines() -> None:
    locks = {path.stem: path.read_text().splitlines() for path in FILE.parent.glob("?pu.lock")}
    assert set(locks) == {"cpu", "gpu"}
    for lock in locks.values():
        assert any(line.startswith("torchvision==") for line in lock)
        assert any(line.startswith("num2words==") for line in lock), "the processor of SmolVLM imports it"
