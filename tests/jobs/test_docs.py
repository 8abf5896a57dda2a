"""The command `slipstream docs`, and the pages that messages name."""

import ast
import re
from pathlib import Path

import pytest

from jobs.docs import files, main, search

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*ROOT.glob("pipeline/**/*.py"), *ROOT.glob("jobs/**/*.py"), *ROOT.glob("configs/**/*.yaml")]


def test_pages_examples_and_manifests_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(files())
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    examples = {str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.py")}
    assert set(listed) == pages | examples | {f"kuberay/{path.name}" for path in ROOT.glob("jobs/kuberay/*.yaml")}


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("rewards", "docs/rewards.md"),
        ("docs/rewards.md", "docs/rewards.md"),
        ("examples/rl_loop.py", "examples/rl_loop.py"),
        ("calculator.py", "examples/agents/calculator.py"),
        ("kuberay/cpu_demo.yaml", "jobs/kuberay/cpu_demo.yaml"),
    ],
)
def test_a_file_is_printed_as_it_is(name: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 0
    assert capsys.readouterr().out == (ROOT / file).read_text()


def test_a_terminal_gets_a_pager(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("pydoc.pager", shown.append)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["rewards"]) == 0
    assert shown == [(ROOT / "docs/rewards.md").read_text()]


def test_a_page_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward"]) == 2
    assert "the page 'reward' does not exist; did you mean rewards?" in capsys.readouterr().err


def test_sections_are_found_by_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--search", "SANDBOX", "memory"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("rewards: ") for line in lines)
    for line in lines:
        name, heading = line.split(": ")[:2]
        assert f"# {heading}" in files()[name].read_text()
    assert main(["--search", "no-such-word-anywhere"]) == 1


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("SFT", "supervised: Supervised training and preferences"),
        ("wandb", "monitoring: Weights & Biases (W&B, wandb)"),
        ("tool calling", "multi_turn: Multi-turn RL: environments, tool calling"),
        ("multi-turn", "multi_turn: Multi-turn RL"),
        ("weight sync", "concepts: Concepts: the loop, the row, weight sync"),
    ],
)
def test_the_page_about_the_words_is_found_first(words: str, first: str) -> None:
    assert search(words.split())[0].startswith(first)


def test_pages_with_more_hits_come_first_after_headings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"a": "# A\nred", "b": "# B\nred, red", "c": "# C\n## Red\n1", "d": "# D\n```\n# red\n```\n## E\n2"}
    for name, text in pages.items():
        (tmp_path / f"{name}.md").write_text(text)
    monkeypatch.setattr("jobs.docs.files", lambda: {path.stem: path for path in sorted(tmp_path.iterdir())})
    assert search(["RED"]) == ["c: Red", "b: B: red, red", "a: A: red", "d: D: # red"]


def strings(path: Path) -> str:
    """The strings of a Python file, without the docstrings of the library; the text of any other file."""
    if path.suffix != ".py":
        return path.read_text()
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    # The docstring of a job's module is its help.
    documented = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    documented += [] if "jobs" in path.relative_to(ROOT).parts else [tree]
    own = {id(node.body[0].value) for node in documented if node.body and isinstance(node.body[0], ast.Expr)}
    texts = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in own]
    return "\n".join(node.value for node in texts if isinstance(node.value, str))


def test_messages_name_pages_that_everyone_has() -> None:
    named = []
    for path in SOURCES:
        text = strings(path)
        assert not re.search(r"docs/\w+\.md", text), path
        named += re.findall(r"`slipstream docs ([\w./]+)`", text)
    assert len(named) > 8 and set(named) <= set(files())
