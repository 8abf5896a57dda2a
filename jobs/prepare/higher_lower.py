"""Prompts of a guessing game: find a number in a few guesses (`examples/agents/higher_lower.py` is the environment).

The test file has each number once, so the score of greedy responses is exactly the fraction of numbers that are found.
In the conversations of the warm start, each guess is drawn from the numbers not tried so far: with probability
`--consistent` only from those which agree with all replies, else from all. So these games are valid but weak.
"""

import argparse
import random
from collections.abc import Iterator

from jobs.prepare import agent_task
from jobs.prepare.agent_task import Messages, assistant, user

help = "a guessing game: find a number from replies of higher and lower"

QUESTION = "Guess."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m jobs.prepare higher_lower`."""
    agent_task.add_arguments(
        parser,
        20_000,
        8_000,
        ("--numbers", int, 63, "largest number"),
        ("--guesses", int, 6, "guesses of one game"),
        ("--consistent", float, 0.5, "share of the warm start's guesses that agree with all replies"),
    )


def prepare(args: argparse.Namespace) -> None:
    """Write the files. After an error, older files are unchanged."""
    agent_task.check(args, numbers=2, guesses=1)
    if args.guesses > args.numbers:
        raise ValueError(f"--guesses is {args.guesses}, but there are only {args.numbers} --numbers")
    draw = random.Random(f"higher_lower {args.seed}")
    tests = [(QUESTION, str(number)) for number in range(1, args.numbers + 1)]
    trains = [(QUESTION, str(draw.randint(1, args.numbers))) for _ in range(args.train)]
    agent_task.write(args, "higher_lower", {"test": tests, "train": trains}, _games(args, draw))


def _games(args: argparse.Namespace, draw: random.Random) -> Iterator[Messages]:
    while True:
        yield game(draw.randint(1, args.numbers), args.numbers, args.guesses, args.consistent, draw)


def game(number: int, numbers: int, guesses: int, consistent: float, draw: random.Random) -> Messages:
    """Return one random game as a conversation.

    Args:
        number: the number to find.
        numbers: largest possible number.
        guesses: maximum number of guesses.
        consistent: probability with which a guess agrees with all replies so far.
        draw: random generator.
    """
    messages = [user(QUESTION)]
    low, high = 1, numbers
    untried = set(range(1, numbers + 1))
    for left in reversed(range(guesses)):
        agree = draw.random() < consistent
        guess = draw.choice(sorted(number for number in untried if not agree or low <= number <= high))
        untried.remove(guess)
        messages.append(assistant(str(guess)))
        if guess == number or not left:
            break
        if guess < number:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
        messages.append(user("higher" if guess < number else "lower"))
    return messages
