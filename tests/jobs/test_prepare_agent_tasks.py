"""`python -m jobs.prepare higher_lower`, `calculator` and `lookup`: prompts, and conversations for a warm start."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.prepare.__main__ import main
from tests.jobs.prepared import Rows, contents, read

FILES = ("sft_test", "sft_train", "test", "train")


def prepare(task: str, out: Path, *options: str) -> dict[str, Rows]:
    assert main([task, "--out", str(out), *options]) == 0
    assert sorted(file.stem for file in out.iterdir()) == sorted(FILES)
    files = {name: read(out / f"{name}.parquet") for name in FILES}
    for split in ("train", "test"):
        for index, row in enumerate(files[split]):
            assert row["data_source"] == task and row["extra_info"] == {"split": split, "index": index}
            assert [message["role"] for message in row["prompt"]] == ["user"]
    return files


def talk(row: dict[str, Any]) -> list[str]:
    """The conversation as texts; of a call its arguments."""
    said = []
    for message in row["messages"]:
        [call] = message["tool_calls"] or [None]
        said.append(message["content"] if call is None else call["function"]["arguments"])
    return said


@pytest.mark.parametrize("task", ["higher_lower", "calculator", "lookup"])
def test_the_same_options_give_the_same_files(task: str, tmp_path: Path) -> None:
    options = ("--train", "30", "--sft", "40")
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        prepare(task, tmp_path / name, *options, "--seed", seed)
    same, again, other = (contents(tmp_path / name) for name in "abc")
    assert same == again and same["train.parquet"] != other["train.parquet"]


@pytest.mark.parametrize(("consistent", "least", "most"), [(0.0, 0.3, 0.55), (0.5, 0.6, 0.85), (1.0, 1.0, 1.0)])
def test_games_are_legal_and_as_consistent_as_asked(
    consistent: float, least: float, most: float, tmp_path: Path
) -> None:
    """A guess at random agrees with the replies by chance, too."""
    files = prepare("higher_lower", tmp_path, "--train", "9", "--sft", "1000", "--consistent", str(consistent))
    truths = [row["reward_model"]["ground_truth"] for row in files["test"]]
    assert truths == [str(number) for number in range(1, 64)]
    agreeing = later = found = 0
    for row in files["sft_train"]:
        question, *said = talk(row)
        guesses, replies = [int(guess) for guess in said[::2]], said[1::2]
        assert question == "Guess." and len(guesses) == len(set(guesses)) == len(replies) + 1 <= 6
        possible = set(range(1, 64))
        for number, guess in enumerate(guesses):
            assert 1 <= guess <= 63
            later += number > 0
            agreeing += number > 0 and guess in possible
            if number < len(replies):
                assert replies[number] in ("higher", "lower")
                possible &= set(range(guess + 1, 64)) if replies[number] == "higher" else set(range(1, guess))
        assert possible  # replies never contradict each other
        found += len(guesses) < 6
    assert least <= agreeing / later <= most
    assert found


def test_products_are_right_and_never_twice(tmp_path: Path) -> None:
    files = prepare("calculator", tmp_path, "--train", "300", "--test", "50", "--sft", "400", "--calls", "0.25")
    asked = [row["prompt"][0]["content"] for split in ("train", "test") for row in files[split]]
    called = 0
    for row in [*files["sft_train"], *files["sft_test"]]:
        question, *steps, answer = talk(row)
        first, second = map(int, question.removesuffix("=?").split("*"))
        assert 100 <= first <= 999 and 10 <= second <= 99
        if steps:
            assert steps == [json.dumps({"expression": f"{first}*{second}"}), answer]
            assert answer == str(first * second)
        else:
            assert not answer[2:].strip("0") and abs(int(answer) / (first * second) - 1) <= 0.05
        called += bool(steps)
        asked.append(question)
        assert json.loads(row["tools"])[0]["function"]["name"] == "calc"
    assert len(asked) == len(set(asked)) == 300 + 50 + 420
    assert 0.18 < called / 420 < 0.32
    truth = files["train"][0]["reward_model"]["ground_truth"]
    assert str(eval(files["train"][0]["prompt"][0]["content"].removesuffix("=?"))) == truth


def test_lookups_of_the_warm_start_ask_for_one_step(tmp_path: Path) -> None:
    files = prepare("lookup", tmp_path, "--train", "200", "--sft", "1000", "--extra", "0.2", "--steps", "3")
    assert len({row["reward_model"]["ground_truth"] for row in files["test"]}) == len(files["test"]) == 270
    assert {row["reward_model"]["ground_truth"][-1] for row in files["train"]} == set("123")
    lookups = []
    for row in files["sft_train"]:
        question, *steps, answer = talk(row)
        assert question.endswith(" take 1.")
        key = int(question.split()[1])
        for asked, found in zip(steps[::2], steps[1::2], strict=True):
            assert json.loads(asked) == {"key": key}
            key = int(found)
        assert answer == str(key) and 10 <= key <= 99
        lookups.append(len(steps) // 2)
    assert set(lookups) == {1, 2, 3} and 0.75 < lookups.count(1) / len(lookups) < 0.85


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("calculator", "--calls", "1.5"), "--calls is 1.5, but must be a share from 0 to 1"),
        (("calculator", "--train", "80000", "--sft", "8000"), "need 88,900 products, but there are 81,000"),
        (("lookup", "--sft", "3"), "--sft is 3, but must be at least 20"),
        (("lookup", "--steps", "0"), "--steps is 0, but must be at least 1"),
        (("higher_lower", "--numbers", "5"), "--guesses is 6, but there are only 5 --numbers"),
    ],
)
def test_errors_are_sentences(
    options: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([options[0], "--out", str(tmp_path / "x"), *options[1:]]) == 2
    assert sentence in capsys.readouterr().err
    assert contents(tmp_path / "x") == {}
