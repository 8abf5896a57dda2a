"""Two processes of `make test` share the slow tests."""

import re
from pathlib import Path

import pytest

from tests.share import Share

ROOT = Path(__file__).parents[1]
FIRST = """
import pytest

@pytest.fixture(scope="module")
def kept(): yield

def test_quick(): pass

@pytest.mark.slow
def test_one(kept): pass

@pytest.mark.slow
def test_two(kept): pass
"""
SECOND = """
import pytest

@pytest.mark.slow
def test_three(): pass

@pytest.mark.ray
@pytest.mark.slow
def test_engine(): pass
"""
MARKERS = "[pytest]\nmarkers =\n  ray\n  vllm\n  slow\n  long\n"


class Ran:
    """Names of the tests that ran, in their order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        assert report.passed, report.longreprtext
        if report.when == "call":
            self.names.append(report.nodeid.split("_")[-1])


@pytest.fixture
def commands() -> list[str]:
    """What `-m` is given in the two processes of `make test`."""
    return re.findall(r"pytest -m '(.*)' --share=", (ROOT / "Makefile").read_text())


def run(folder: Path, which: str, *more: str) -> list[str]:
    """Run the tests of a process of `make test`."""
    options = ["-q", "--import-mode=importlib", "-c", str(folder / "pytest.ini"), str(folder), "-m", which, *more]
    # The latter two would collect the garbage of the outer process again and again, and end its reports of crashes.
    without = [
        word for name in ("cacheprovider", "unraisableexception", "faulthandler") for word in ("-p", f"no:{name}")
    ]
    ran = Ran()
    assert pytest.main([*options, *without], plugins=[ran, Share(folder / "claims")]) == 0
    return ran.names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "claims").mkdir()
    (tmp_path / "pytest.ini").write_text(MARKERS)
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    return tmp_path


def test_a_process_runs_its_own_tests_first_and_shared_ones_from_its_end(commands: list[str], folder: Path) -> None:
    quick, engines = commands
    assert run(folder, engines) == ["engine", "three", "two", "one"]
    assert run(folder, quick) == ["quick"]


def test_a_shared_test_runs_in_one_process(commands: list[str], folder: Path) -> None:
    quick, engines = commands
    assert run(folder, quick, "--deselect", "test_first.py::test_one") == ["quick", "two", "three"]
    assert run(folder, engines) == ["engine", "one"]


def test_fixtures_end_with_the_last_test_that_this_process_has_of_them(commands: list[str], folder: Path) -> None:
    quick, engines = commands
    assert run(folder, engines, "-k", "two or engine") == ["engine", "two"]
    assert run(folder, quick) == ["quick", "one", "three"]
