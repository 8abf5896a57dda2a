"""The page of settings: up to date, complete, and refusing fields without a description."""

from dataclasses import dataclass

import pytest

from jobs.docs_configuration import PAGE, descriptions, main, page
from pipeline.config import CONFIG_DIR, Config
from pipeline.schema import keys


@dataclass
class Described:
    a: int = 1
    """Described."""


@dataclass
class Undocumented(Described):
    b: int = 2


def test_committed_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "run make docs"
    assert main(["--check"]) == 0


def test_every_key_has_a_row():
    text = page()
    assert all(f"| `{name}` |" in text for name in keys(Config))


def test_out_of_date_page_is_noticed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("jobs.docs_configuration.PAGE", tmp_path / "configuration.md")
    assert main(["--check"]) == 1
    assert "make docs" in capsys.readouterr().err
    assert main([]) == 0 and main(["--check"]) == 0


def test_field_without_docstring_is_refused():
    with pytest.raises(ValueError, match="Undocumented: no docstring under b"):
        descriptions(Undocumented)


@dataclass
class Inherits(Described):
    c: int = 3
    """Its own."""


def test_inherited_fields_keep_their_docstring():
    assert descriptions(Inherits) == {"a": "Described.", "c": "Its own."}


def test_each_section_stands_once_and_defaults_are_those_in_force():
    text = page()
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert len(headings) == len(set(headings))
    assert "| `critic.optim.lr` | `float` | `1e-05` |" in text


def test_every_algorithm_is_listed():
    text, names = page(), [path.stem for path in CONFIG_DIR.glob("algorithm/*.yaml")]
    assert names and all(f"| `{name}` | " in text for name in names)
