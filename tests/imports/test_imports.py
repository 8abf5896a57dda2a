"""Code of the user is named and imported in one way."""

import sys
from pathlib import Path

import pytest

from pipeline.imports import NotCode, is_file, is_spec, load, split


@pytest.mark.parametrize(
    ("spec", "code", "name"),
    [
        ("my_game:Game", "my_game", "Game"),
        ("package.module:Name", "package.module", "Name"),
        ("/a/b.py:Name", "/a/b.py", "Name"),
        ("/a:b/c.py", "/a:b/c.py", ""),
        ("/a:b/c.py:run", "/a:b/c.py", "run"),
        ("module", "module", ""),
        ("module:", "module", ""),
    ],
)
def test_split(spec: str, code: str, name: str) -> None:
    assert split(spec) == (code, name)
    assert is_file(code) == code.endswith(".py")
    assert is_spec(spec) == bool(name)


@pytest.mark.parametrize("spec", ["a b:Name", "module:1x", "/a/b.txt:Name", ":Name", "mod-ule:Name", "file.py:a.b", ""])
def test_what_has_another_form(spec: str) -> None:
    assert not is_spec(spec)


def test_a_file_is_imported_once_and_files_of_one_name_are_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same_name.py").write_text(f"WHERE = {folder!r}\n")
    first, second = (load(f"{tmp_path}/{folder}/same_name.py") for folder in ("a", "b"))
    assert (first.WHERE, second.WHERE) == ("a", "b")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert load(f"{tmp_path}/a/same_name.py") is first is load(f"{tmp_path}/link/same_name.py")
    assert load("pipeline.imports") is sys.modules["pipeline.imports"]


def test_the_home_folder_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "at_home.py").write_text("X = 1\n")
    assert load("~/at_home.py").X == 1


def test_a_file_that_fails_is_imported_anew(tmp_path: Path) -> None:
    file = tmp_path / "leaves.py"
    file.write_text("raise SystemExit(3)\n")
    with pytest.raises(SystemExit):
        load(str(file))
    file.write_text("X = 1\n")
    assert load(str(file)).X == 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("nowhere.py", "does not exist"),
        ("no/where", "does not exist"),
        (".", "is a folder"),
        ("a b", "neither"),
        ("", "neither"),
    ],
)
def test_why_code_cannot_be_imported(code: str, words: str) -> None:
    with pytest.raises(NotCode, match=words):
        load(code)
