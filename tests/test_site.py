"""The site of the pages: the field's words lead to the pages that answer them, and every page is in its menu."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ANSWERS = {
    "wandb": "monitoring",
    "W&B": "monitoring",
    "MLflow": "monitoring",
    "troubleshooting": "monitoring",
    "custom reward": "rewards",
    "colocate": "gpus",
    "gradient accumulation": "gpus",
    "sequence packing": "concepts",
    "weight sync": "concepts",
    "on-policy": "concepts",
    "tool calling": "multi_turn",
    "multi-turn": "multi_turn",
    "agents": "multi_turn",
    "multi-node": "clusters",
    "Slurm": "clusters",
    "KubeRay": "clusters",
    "quickstart": "quickstart",
    "SFT": "supervised",
    "DPO": "supervised",
    "GRPO": "algorithms",
    "verl": "coming_from",
    "glossary": "coming_from",
}
"""The page that answers a word of the field."""


def leading(page: str) -> str:
    """The headings of a page, and the first paragraph under each."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    return "\n".join(re.findall(r"^#+ [^\n]+(?:\n+[^\n#|]+(?:\n[^\n]+)*)?", text, re.MULTILINE))


@pytest.mark.parametrize(("word", "page"), ANSWERS.items(), ids=ANSWERS)
def test_a_word_of_the_field_leads_to_its_page(word: str, page: str) -> None:
    assert word.casefold() in leading((ROOT / "docs" / f"{page}.md").read_text()).casefold()


def test_every_page_is_in_the_menu() -> None:
    menu = re.findall(r": (\w+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(menu) == sorted(["index", *(path.stem for path in (ROOT / "docs").glob("*.md"))])
