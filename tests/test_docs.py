"""The documentation names what there is: algorithms, estimators and losses; its links lead somewhere."""

import re
from pathlib import Path
from typing import Any

import pytest

import pipeline.advantage.estimators  # noqa: F401 (fills the registry)
from pipeline.advantage import registry as estimators
from pipeline.losses import AGG_MODES
from pipeline.losses import registry as losses

ROOT = Path(__file__).parents[1]
ALGORITHMS = {path.stem for path in (ROOT / "configs" / "algorithm").glob("*.yaml")}
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def section(page: str, heading: str) -> str:
    """The text under a heading, up to the next one of level 2."""
    return (ROOT / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> set[str]:
    """The names in backticks in the first column of the tables in `text`."""
    rows = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)} - {"algorithm="}


def built_in(registry: dict[str, Any]) -> set[str]:
    return {name for name, known in registry.items() if known.function.__module__.startswith("pipeline.")}


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_algorithm_has_its_row() -> None:
    assert first_cells(section("docs/algorithms.md", "All of them")) == ALGORITHMS


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Advantage estimators", built_in(estimators._ESTIMATORS)),
        ("Policy losses", built_in(losses._POLICY_LOSSES)),
        ("Aggregation", set(AGG_MODES)),
    ],
)
def test_every_built_in_choice_has_its_row(heading: str, names: set[str]) -> None:
    assert first_cells(section("docs/algorithms.md", heading)) == names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}"
