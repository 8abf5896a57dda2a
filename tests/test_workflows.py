"""The workflows: what their steps name is there, and the script runs them."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests import workflows
from tests.workflows import Step, main, steps

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", workflows.workflows())
def test_actions_have_a_version_and_jobs_a_limit_and_no_rights(name: str) -> None:
    content = workflows.workflows()[name]
    assert content["permissions"] == {"contents": "read"} and content["name"]
    for job in content["jobs"].values():
        assert job["timeout-minutes"] <= 360 and job["runs-on"] == "ubuntu-latest"
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert "run" not in step or step["name"]
            assert "uses" not in step or re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])


@pytest.mark.parametrize("step", list(steps()), ids=lambda step: f"{step.job}: {step.name}")
def test_a_step_names_what_is_there(step: Step) -> None:
    program, *words = shlex.split(step.command)
    assert subprocess.run(["bash", "-nc", step.command]).returncode == 0
    if program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert words[0] in targets and all(re.fullmatch(r"[A-Z]+=\w+", word) for word in words[1:])
    elif program == "dist/install.sh":
        assert (ROOT / "requirements" / "install.sh").is_file() and (ROOT / f"requirements/{words[0]}.lock").is_file()
    else:
        assert program in (".venv/bin/python", "python3")
        module = words[1] if words[0] == "-m" else ""
        assert module == "pytest" or (ROOT / (f"{module.replace('.', '/')}.py" if module else words[0])).is_file()
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))


def test_the_kinds_of_tests_are_all_run() -> None:
    commands = " ".join(step.command for step in steps())
    for part in ("make lint", "make test-fast", "-m 'ray and not vllm'", "-m vllm", "tests/test_docs.py"):
        assert part in commands


def test_the_script_runs_steps_until_one_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some.yml").write_text(
        "jobs:\n  one:\n    steps:\n      - uses: actions/checkout@v5\n      - {name: a, run: echo first}\n"
        "  two:\n    steps:\n      - {name: b, run: exit 3}\n      - {name: c, run: echo never}\n"
    )
    monkeypatch.setattr(workflows, "FOLDER", tmp_path)
    assert main(["--list"]) == 0
    assert "== some/two: c: echo never" in capfd.readouterr().out
    assert main(["some/one"]) == 0 and main([]) == 3
    printed = capfd.readouterr().out.splitlines()
    assert printed.count("first") == 2 and "never" not in printed and "== exit code 3 after 0 s" in printed
