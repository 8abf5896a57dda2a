"""The documentation names what there is: algorithms, estimators and losses; its links lead somewhere."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.agent import Message
from pipeline.agent.errors import PolicyMistake
from pipeline.agent.processes import Processes
from pipeline.catalogue import ESTIMATORS, POLICY_LOSSES
from pipeline.config import Config
from pipeline.config.agent import AgentConfig
from pipeline.config.schema import keys
from pipeline.losses import AGG_MODES

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
    return {name for name, known in registry.items() if known.built_in}


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_algorithm_has_its_row() -> None:
    assert first_cells(section("docs/algorithms.md", "All of them")) == ALGORITHMS


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Advantage estimators", built_in(ESTIMATORS)),
        ("Policy losses", built_in(POLICY_LOSSES)),
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


def test_the_environment_and_the_tools_of_the_documentation_work(tmp_path: Path) -> None:
    files = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", (ROOT / "docs" / "agents.md").read_text(), re.M | re.S)
    assert [name for name, _ in files] == ["my_game.py", "my_tools.py", "my_program.py"]
    for name, text in files:
        (tmp_path / name).write_text(text)
    program: dict[str, Any] = {}
    exec(files[-1][1], program)
    asked: list[Any] = []

    async def chat(messages: list[dict[str, Any]]) -> Message:
        asked.append(messages)
        return Message("4" if len(asked) == 2 else "5")

    row = {"prompt": [{"role": "user", "content": "2+2"}], "ground_truth": "4"}
    assert asyncio.run(program["run"](row, chat)) == {"reward": 1.0}
    assert asked[1] == [{"role": "user", "content": "Find the mistake:\n5"}]
    config = AgentConfig(environment=f"{tmp_path}/my_game.py:HigherLower", tools=[f"{tmp_path}/my_tools.py"])

    async def play() -> None:
        processes = Processes(config)
        try:
            assert [tool["function"]["name"] for tool in (await processes.start()).tools] == ["price"]
            session = await processes.open({"prompt": []}, 5, 30)
            assert session.opened == "Guess a number from 1 to 63."
            low, high, guesses, seen = 1, 63, 0, await session.step(Message("what?"), 30)
            assert seen.content == "higher" and not seen.done
            while not seen.done:
                guess, guesses = (low + high) // 2, guesses + 1
                seen = await session.step(Message(str(guess)), 30)
                low, high = (guess + 1, high) if seen.content == "higher" else (low, guess - 1)
            assert guesses <= 5 and (seen.reward, seen.parts) in ((1.0, {"acc": 1}), (None, {"acc": 0}))
            assert await session.call("price", {"fruit": "pear", "pieces": 3}, 30) == "12"
            with pytest.raises(PolicyMistake, match="there is no plum; there are apple, pear"):
                await session.call("price", {"fruit": "plum"}, 30)
        finally:
            await processes.close()

    asyncio.run(play())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_of_episodes_are_keys(page: Path) -> None:
    named = set(re.findall(r"(?<![\w.*`])`?(agent\.[a-z_]+)(?![\w.(])", page.read_text()))
    assert named <= set(keys(Config)), page.name
