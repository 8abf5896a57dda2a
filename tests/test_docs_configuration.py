"""The page of settings: up to date, complete, and refusing fields without a description."""

from dataclasses import dataclass

import pytest

from pipeline.config import Config
from pipeline.config.described import descriptions
from pipeline.config.schema import keys
from tests.docs_configuration import JOBS, PAGE, main, page


@dataclass
class Described:
    a: int = 1
    """Described."""


@dataclass
class Inherits(Described):
    c: int = 3
    """Its own."""


@dataclass
class Undocumented(Described):
    b: int = 2


def test_committed_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run make docs"
    assert main(["--check"]) == 0


def test_every_key_has_a_row_in_the_table_of_its_section() -> None:
    listed = []
    run, supervised = page().split("\n## Supervised training")
    for table in run.split("\n## ")[1:]:
        sections = table.partition("\n")[0].replace("`", "").split(", ")
        for line in table.splitlines():
            if line.startswith("| `"):
                name = line.split(" | ")[0].strip("| `")
                listed += [name] if len(sections) == 1 else [f"{section}.{name}" for section in sections]
    assert sorted(listed) == sorted(keys(Config))
    above = {key.owner for key in keys(Config).values()}
    rows = [line.split(" | ")[0].strip("| `") for line in supervised.splitlines() if line.startswith("| `")]
    for schema in JOBS.values():
        assert {key.name for key in keys(schema).values() if key.owner not in above} <= set(rows)


def test_out_of_date_page_is_noticed(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr("tests.docs_configuration.PAGE", tmp_path / "configuration.md")
    assert main(["--check"]) == 1
    assert "make docs" in capsys.readouterr().err
    assert main([]) == 0 and main(["--check"]) == 0


def test_every_field_needs_a_docstring_and_inherited_fields_keep_theirs() -> None:
    assert descriptions(Inherits) == {"a": "Described.", "c": "Its own."}
    with pytest.raises(ValueError, match="Undocumented: no docstring under b"):
        descriptions(Undocumented)
