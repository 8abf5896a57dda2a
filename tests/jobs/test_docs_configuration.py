"""The page of settings: up to date, complete, and refusing fields without a description."""

from dataclasses import dataclass

import pytest

from jobs.docs_configuration import PAGE, descriptions, main, page
from pipeline.config import Config, keys


@dataclass
class Undocumented:
    a: int = 1
    """Described."""

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
