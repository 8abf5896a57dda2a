"""Prompts to guess a number, as in tinker's cookbook (`examples/agents/guess_number.py` is the environment).

The test file has numbers at equal distances over the range. In the conversations of the warm start, each guess is drawn
from the numbers that agree with all replies, so these games have the right form but no strategy.
"""

import argparse
import random
from collections.abc import Iterator
from typing import Any

from jobs.prepare import agent_task
from jobs.prepare.agent_task import Messages, assistant, user

help = "a number to guess from replies of too low and too high, for chat models"

QUESTION = (
    "Guess a whole number from 0 to {highest}. You have {turns} guesses. After each guess I answer Too low or Too "
    "high. Write only your guess in this form: Guess: 7"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m jobs.prepare guess_number`."""
    agent_task.add_arguments(
        parser,
        2_000,
        800,
        ("--test", int, 64, "test prompts"),
        ("--highest", int, 1024, "largest number"),
        ("--turns", int, 10, "guesses of one game"),
    )


def prepare(args: argparse.Namespace) -> None:
    """Write the files. After an error, older files are unchanged."""
    agent_task.check(args, test=1, highest=1, turns=1)
    if args.test > args.highest + 1:
        raise ValueError(f"--test is {args.test}, but there are only {args.highest + 1} numbers up to --highest")
    draw = random.Random(f"guess_number {args.seed}")
    question = QUESTION.format(highest=args.highest, turns=args.turns)
    tests = [(question, str(index * args.highest // max(1, args.test - 1))) for index in range(args.test)]
    trains = [(question, str(draw.randint(0, args.highest))) for _ in range(args.train)]
    agent_task.write(args, "guess_number", {"test": tests, "train": trains}, _games(args, question, draw))


def _games(args: argparse.Namespace, question: str, draw: random.Random) -> Iterator[Messages]:
    while True:
        yield game(draw.randint(0, args.highest), args.highest, args.turns, question, draw)


def game(number: int, highest: int, turns: int, question: str, draw: random.Random) -> list[dict[str, Any]]:
    """Return one random game as a conversation.

    Args:
        number: the number to find.
        highest: largest possible number.
        turns: maximum number of guesses.
        question: text of the prompt.
        draw: random generator.
    """
    messages, low, high = [user(question)], 0, highest
    for left in reversed(range(turns)):
        guess = draw.randint(low, high)
        messages.append(assistant(f"Guess: {guess}"))
        if guess == number or not left:
            break
        messages.append(user("Too low" if guess < number else "Too high"))
        low, high = (guess + 1, high) if guess < number else (low, guess - 1)
    return messages
