"""Which files a user's code consists of; none of it is run."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline.run import modules
from pipeline.run.modules import files_of, user_path

FAIL = "raise SystemExit('this code was run')\n"


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{FAIL}{text}\n")


def names(named: str, *path: Path) -> list[str]:
    return sorted(name for name, _ in files_of(named, path))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import helpers", ["helpers.py"]),
        ("import helpers as h, other", ["helpers.py", "other.py"]),
        ("from helpers import f", ["helpers.py"]),
        ("from package import helpers", ["package/__init__.py", "package/helpers.py"]),
        ("import package.inner.deep", ["package/__init__.py", "package/inner/deep.py"]),
        ("from package.inner import deep", ["package/__init__.py", "package/inner/deep.py"]),
        ("from package import nothing", ["package/__init__.py"]),
        ("def f():\n    import helpers", ["helpers.py"]),
        ("try:\n    import helpers\nexcept ImportError: pass", ["helpers.py"]),
        ("import importlib\nimportlib.import_module('helpers')", ["helpers.py"]),
        ("__import__('helpers')", ["helpers.py"]),
        ("import a", ["a.py", "b.py"]),
        ("import compiled", ["compiled.cpython-311-x86_64-linux-gnu.so"]),
        ("import json, numpy, nowhere", []),
        ("import data", []),
        ("from package import user", ["helpers.py", "package/__init__.py", "package/helpers.py", "package/user.py"]),
        ("import broken", ["broken.py"]),
        ("from pipeline.agent import Environment", []),
    ],
)
def test_imports_are_followed_in_the_folder_of_the_file(tmp_path: Path, line: str, found: list[str]) -> None:
    write(
        tmp_path,
        {
            **dict.fromkeys(("helpers.py", "other.py", "package/__init__.py", "package/helpers.py"), ""),
            **{"package/inner/deep.py": "", "a.py": "import b", "b.py": "import a", "data/rows.txt": ""},
            **{"package/user.py": "from . import helpers\nfrom .helpers import f\nimport helpers"},
            **{"broken.py": "def f(:", "compiled.cpython-311-x86_64-linux-gnu.so": "", "unused.py": ""},
            **{"reward.py": line},
        },
    )
    assert names(f"{tmp_path}/reward.py") == sorted([*found, "reward.py"])


def test_relative_imports_go_up(tmp_path: Path) -> None:
    write(tmp_path, {"p/__init__.py": "", "p/q/__init__.py": "", "p/q/r.py": "from ..s import f", "p/s.py": ""})
    assert names("p.q.r", tmp_path) == ["p/__init__.py", "p/q/__init__.py", "p/q/r.py", "p/s.py"]


def test_modules_of_the_users_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"here/mine.py": "import theirs", "there/theirs.py": "", "further/more.py": "import mine"})
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/there:{Path(pytest.__file__).parents[1]}")
    path = user_path(f"{tmp_path}/further")
    assert path == [tmp_path / "here", tmp_path / "there", tmp_path / "further"]
    assert names("mine", *path) == ["mine.py", "theirs.py"]
    assert names("more", *path) == ["mine.py", "more.py", "theirs.py"]
    assert names("nowhere", *path) == [] == names("pipeline.reward.judge", *path)


def test_an_installed_module_is_followed_within_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site-packages"
    write(site, {"mine/__init__.py": "", "mine/reward.py": "import mine.helpers, other", "mine/helpers.py": ""})
    write(site, {"other.py": ""})
    monkeypatch.syspath_prepend(str(site))
    assert names("mine.reward") == ["mine/__init__.py", "mine/helpers.py", "mine/reward.py"]


def test_slipstream_itself_is_no_code_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its source is on the path, as in a checkout."""
    write(tmp_path, {"reward.py": "import pipeline.rows, tests.runs, jobs.train"})
    found = names(f"{tmp_path}/reward.py", modules.OWN)
    assert "tests/runs.py" in found and not [name for name in found if name.startswith(("pipeline/", "jobs/"))]


def test_a_link_has_the_same_names(tmp_path: Path) -> None:
    write(tmp_path, {"real/reward.py": "import helpers", "real/helpers.py": ""})
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert names(f"{tmp_path}/link/reward.py") == names(f"{tmp_path}/real/reward.py") == ["helpers.py", "reward.py"]


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    assert names(f"{tmp_path}/gone.py") == []
