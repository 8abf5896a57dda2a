"""`python -m jobs.prepare guess_number`, and its environment, which finds the games of the warm start legal."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from jobs.prepare.__main__ import main
from pipeline.agent import Message
from tests.jobs.prepared import read

ENVIRONMENT = Path(__file__).resolve().parents[2] / "examples" / "agents" / "guess_number.py"


def game(number: int, **kwargs: Any) -> Any:
    made = runpy.run_path(str(ENVIRONMENT))["GuessNumber"](**kwargs)
    made.reset({"ground_truth": str(number)}, 0)
    return made


def test_games_of_the_warm_start_are_legal(tmp_path: Path) -> None:
    options = ("--train", "9", "--sft", "60", "--test", "5", "--highest", "32", "--turns", "4")
    assert main(["guess_number", "--out", str(tmp_path), *options]) == 0
    truths = [row["reward_model"]["ground_truth"] for row in read(tmp_path / "test.parquet")]
    assert truths == ["0", "8", "16", "24", "32"]
    found = 0
    for row in read(tmp_path / "sft_train.parquet"):
        question, *said = [message["content"] for message in row["messages"]]
        assert "from 0 to 32" in question and "4 guesses" in question
        guesses = said[::2]
        # A lost game agrees with any number that its replies leave.
        outcomes = [_replies(game(number, highest=32, turns=4), guesses) for number in range(33)]
        assert said[1::2] in outcomes
        found += len(guesses) < 4
    assert 0 < found < 60


def _replies(play: Any, guesses: list[str]) -> list[str]:
    replies = [play.step(Message(guess)) for guess in guesses]
    return [seen.content for seen in replies[:-1]]


@pytest.mark.parametrize(
    ("text", "reward"),
    [("Guess: 40", 1.0), (" Guess: 40\n", 1.0), ("Guess: 7", 0.0), ("Guess: 999999999", 0.0), ("40", -1.0), ("", -1.0),
     ("Guess: 40 Guess: 41", -1.0), ("Guess: " + "9" * 5000, -1.0), ("Guess: \u0664\u0660", -1.0)],
)  # fmt: skip
def test_one_guess_is_read_and_everything_else_costs(text: str, reward: float) -> None:
    seen = game(40).step(Message(text))
    assert seen.reward == reward and seen.done == (reward == 1.0) and seen.parts == {"acc": int(reward == 1.0)}


def test_bisection_finds_every_number_but_the_last_guess_ends_the_game() -> None:
    for number in (0, 511, 512, 1022):
        play, low, high = game(number), 0, 1022
        for _ in range(10):
            middle = (low + high) // 2
            seen = play.step(Message(f"Guess: {middle}"))
            low, high = (middle + 1, high) if seen.content == "Too low" else (low, middle - 1)
            if seen.done:
                break
        assert seen.reward == 1.0
    play = game(3, turns=2)
    assert [play.step(Message("Guess: 1")).done for _ in range(2)] == [False, True]


def test_a_number_outside_of_the_range_is_an_error_of_the_data() -> None:
    with pytest.raises(ValueError, match=r"the ground truth is 40, but agent.kwargs.highest is 32"):
        game(40, highest=32)
