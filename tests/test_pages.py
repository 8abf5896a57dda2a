"""Every command of the pages is run by `tests.pages`, or left out for a reason."""

import re
import shlex

import pytest

from tests.pages import LEFT_OUT, LINES, PAGES, STAND_INS, Command, commands, files

ALL = [command for page in PAGES for command in commands(page)]


def test_commands_are_read_whole() -> None:
    assert Command("quickstart", "slipstream demo --seed 2 trainer.total_training_steps=20") in ALL
    assert Command("quickstart", "make wheel") in ALL
    assert not any(command.text.endswith("\\") or " # " in command.text for command in ALL)
    assert len(ALL) > 100 and sum(command.left_out is None for command in ALL) > 70


@pytest.mark.parametrize("page", PAGES)
def test_a_command_that_is_run_names_only_things_that_are_there(page: str) -> None:
    """A reader's own names have stand-ins, and names of Python files are those of the page."""
    for command in commands(page):
        if command.left_out is None:
            assert not re.search(r"Qwen/|\bMODEL\b|s3:|https?:|/code/|\.\.\.|\bUID\b", command.run), command
            for name in re.findall(r"(?<![\w/.])(\w+\.py)\b", command.run):
                assert name in {**files(page), **files("quickstart")}, command


def test_training_only_plans_and_a_demo_is_short() -> None:
    run = Command("rewards", "slipstream train ... reward.model.path=models/reward trainer.experiment_name=mine").run
    words = shlex.split(run)
    assert words[:3] == ["slipstream", "train", "--dry-run"] and "model.path=models/tiny-sft-1" in words
    assert "trainer.experiment_name=page" not in words and "reward.model.path=models/tiny-sft-1" in words
    assert Command("README", "slipstream demo").run == "slipstream demo trainer.total_training_steps=1"


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in [*LEFT_OUT, *STAND_INS]])
def test_no_pattern_is_left_over(pattern: str) -> None:
    assert any(re.search(pattern, command.text) for command in ALL)


def test_files_of_the_pages() -> None:
    assert list(files("quickstart")) == ["make_data.py", "my_reward.py", "experiments/experiment/sums.yaml"]
    assert "my_agent.py" in files("multi_turn") and "make_sums.py" in files("supervised")
    assert all(any(name in command.text for command in ALL) for name in LINES)
