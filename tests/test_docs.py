"""The pages name only algorithms, settings, files, commands and options that exist; links lead somewhere."""

import asyncio
import importlib.util
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.advantage.registry import EstimatorInput
from pipeline.agent import Message
from pipeline.agent.errors import PolicyMistake
from pipeline.agent.processes import Processes
from pipeline.agent.zygote import INHERITED
from pipeline.catalogue import ESTIMATORS, POLICY_LOSSES
from pipeline.config import Config
from pipeline.config.agent import AgentConfig
from pipeline.config.described import descriptions
from pipeline.config.preference import DPOConfig
from pipeline.config.schema import keys
from pipeline.config.supervised import PreferenceConfig, SFTConfig
from pipeline.losses import AGG_MODES
from pipeline.losses.registry import LossInput

ROOT = Path(__file__).parents[1]
ALGORITHMS = {path.stem for path in (ROOT / "configs" / "algorithm").glob("*.yaml")}
SCHEMAS = {"train": Config, "sft": SFTConfig, "reward_model": PreferenceConfig, "dpo": DPOConfig}
"""The settings of each job; the others take those of a run."""
FOLDERS = ("pipeline", "jobs", "docs", "configs", "examples", "requirements", "tests", "benchmarks")
SUFFIXES = "py|md|yaml|yml|json|jsonl|parquet|safetensors|lock|csv|txt|bin"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMED = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""Pages whose names must exist; the changelog has those of the past, too."""


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
    page = (ROOT / "docs" / "multi_turn.md").read_text()
    files = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page, re.M | re.S)
    assert [name for name, _ in files] == [
        *("my_game.py", "make_rows.py", "my_tools.py", "make_shop.py", "my_reward.py", "my_program.py")
    ]
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


def test_the_data_and_the_reward_of_the_quickstart_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    texts = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page, re.M | re.S))
    assert list(texts) == ["make_data.py", "my_reward.py"]
    monkeypatch.chdir(tmp_path)
    exec(texts["make_data.py"], {})
    reward: dict[str, Any] = {}
    exec(texts["my_reward.py"], reward)
    row = pq.read_table("train.parquet").to_pylist()[0]
    numbers = row["reward_model"]["ground_truth"]
    assert row["prompt"][0]["content"].endswith(f" Target: {sum(numbers)}.")
    for text, right in ((" + ".join(map(str, reversed(numbers))), 1), (f"{numbers[0]} + {numbers[1]}", 0)):
        scored = reward["compute_score"](row["data_source"], f"<answer> {text} </answer>", numbers, None)
        assert scored == {"score": right, "acc": right}


def settings_of(*schemas: type) -> tuple[set[str], tuple[str, ...]]:
    """Dotted names of all sections and keys, and the beginnings of names inside keys that hold a mapping."""
    found, inside = set(), []
    for key in (key for schema in schemas for key in keys(schema).values()):
        parts = key.name.split(".")
        found |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        if "dict[" in str(key.type) or key.type is Any:
            inside.append(f"{key.name}.")
    return found, tuple(inside)


def unknown(names: set[str], *schemas: type) -> set[str]:
    """The names that are no section and no key, and lie in no key that holds a mapping."""
    known, inside = settings_of(*schemas)
    return {name for name in names if name not in known and not name.startswith(inside)}


def setting_names(text: str) -> set[str]:
    """Dotted names that begin with a section. `x.{a,b}` is two; names of files, calls and import paths do not count."""
    for whole, before, names in re.findall(r"(([\w.]+)\.\{([\w,]+)\})", text):
        text = text.replace(whole, " ".join(f"{before}.{name}" for name in names.split(",")))
    sections = "|".join(sorted({name.split(".")[0] for schema in SCHEMAS.values() for name in keys(schema)}))
    names = re.findall(rf"(?<![\w./*$@-])(?!model\.layers)((?:{sections})(?:\.\w+)+)(?![\w(/]|\.\w|:\w)", text)
    return {name for name in names if not re.search(rf"\.(?:{SUFFIXES})$", name)}


def leaves(tree: dict[str, Any], prefix: str = "") -> set[str]:
    """Dotted names of the values of a YAML file."""
    names: set[str] = set()
    for name, value in tree.items():
        names |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name}
    return names


def commands(text: str) -> list[tuple[str, str]]:
    """The module and the arguments of every `python -m MODULE ...` and `slipstream JOB ...`."""
    text = re.sub(r"\\\n\s*", " ", text)
    pattern = r"(?:python -m ([a-z][\w.]*)|(?:^|`|\s\s)slipstream\s([a-z_]+)(?=[\s`]))([^`\n#&]*)"
    return [
        (module.rstrip(".") or f"jobs.{job}", arguments)
        for module, job, arguments in re.findall(pattern, text, re.MULTILINE)
    ]


def source(module: str) -> str:
    """The text of a module or a package of this repository; empty if there is none."""
    file = ROOT / module.replace(".", "/")
    files = [file.with_suffix(".py")] if file.with_suffix(".py").is_file() else sorted(file.glob("*.py"))
    return "\n".join(path.read_text() for path in files)


def options(module: str) -> set[str]:
    """The options that a command declares, in its own module or in one beside it that it imports from."""
    text = source(module)
    beside = re.findall(r"^from ((?:jobs|benchmarks|tests)[\w.]*) import", text, re.MULTILINE)
    found = set(re.findall(r'"(--[a-z][a-z-]*)"', "".join([text, *map(source, beside)])))
    if 'f"--{' in text:
        found |= {f"--{word}" for word in re.findall(r'"([a-z]+)"', text)}
    return found | {"--help"}


@pytest.mark.parametrize("page", NAMED, ids=lambda page: page.name)
def test_named_settings_are_settings(page: Path) -> None:
    text = page.read_text()
    if page.name == "coming_from.md":
        # Keys of other projects are in all columns but the last.
        text = re.sub(r"^\|.*\|(?=[^|]*\|$)", "", text, flags=re.MULTILINE)
    names = setting_names(text)
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        names |= leaves(yaml.safe_load(block))
    if page.name == "algorithms.md":
        names -= {f"data.{name}" for owner in (EstimatorInput, LossInput) for name in dir(owner)}
        names -= {f"data.{name}" for owner in (EstimatorInput, LossInput) for name in owner.__annotations__}
    assert not unknown(names, *SCHEMAS.values())


@pytest.mark.parametrize("page", NAMED, ids=lambda page: page.name)
def test_named_commands_options_and_their_settings_are_there(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join(re.findall(r"^```.*?^```|^    .*?$|`[^`]+`", text, re.MULTILINE | re.DOTALL))
    assert set(re.findall(r"^[ `]*make ([a-z][a-z-]*)", code, re.MULTILINE)) <= targets
    for module, arguments in commands(text):
        if module == "jobs.NAME":
            continue
        if not source(module):
            assert module.split(".")[0] not in FOLDERS and importlib.util.find_spec(module), module
            continue
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", arguments):
            assert option in options(module), f"{module} {option}"
        # The settings of a job are those of its own schema.
        names = set(re.findall(r"(?<!\S)'?([a-z][\w.]*)=", arguments)) - {"experiment", "algorithm"}
        schema = SCHEMAS.get(module.removeprefix("jobs."), Config)
        assert not unknown(names, schema), f"{module} {arguments}"


@pytest.mark.parametrize("page", NAMED, ids=lambda page: page.name)
def test_named_files_are_there(page: Path) -> None:
    text = re.sub(r"--out \S+", "", page.read_text())
    for name in re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./*-]+)", text):
        assert list(ROOT.glob(name.rstrip("./").replace("NAME", "*"))), name
    modules = re.findall(r"(?<![\w./-])((?:pipeline|jobs|benchmarks|tests)(?:\.(?!md)[a-z]\w*)+)(:\w+)?", text)
    for name, attribute in modules:
        inner, outer = name.rpartition(".")[2], name.rpartition(".")[0]
        assert source(name) or re.search(rf"\b{inner}\b", source(outer)), name
        assert re.search(rf"\b{attribute[1:]}\b", source(name)), f"{name}{attribute}"
    ours = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*")} | {
        path.name for path in ROOT.iterdir()
    }
    written = set(re.findall(r"^# (\w+\.py)$", "\n".join(other.read_text() for other in NAMED), re.MULTILINE))
    for name in re.findall(r"`(\w+\.py)`", text):
        assert name in ours | written, name


def test_the_variables_that_environments_inherit_are_named() -> None:
    assert set(re.findall(r"`([A-Z_]+)`", descriptions(AgentConfig)["env_vars"])) == set(INHERITED)
