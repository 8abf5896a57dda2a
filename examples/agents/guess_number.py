"""A number to guess, with the rewards of tinker's cookbook (`multiplayer_rl/guess_number`).

    python -m jobs.train agent.environment=examples/agents/guess_number.py:GuessNumber \
        agent.kwargs='{highest: 1024, turns: 10}' agent.max_turns=10 data.train_files=...

The rows come from `python -m jobs.prepare guess_number`; their ground truth is the number.
"""

import re

from pipeline.agent import Environment, Observation

GUESS = re.compile(r"Guess: ([0-9]{1,9})", re.ASCII)


class GuessNumber(Environment):
    """Replies `Too low` or `Too high` until the number is found or no turn is left.

    The last turn of a found number has the reward 1, and each answer that is not a guess has -1; a number above
    `highest` is a guess like any other. The part `acc` of the score is 1 if the number was found.

    Args:
        highest: the largest number; the smallest is 0.
        turns: number of guesses.
    """

    def __init__(self, highest: int = 1024, turns: int = 10):
        self.highest, self.turns = highest, turns

    def reset(self, row, seed):
        self.number, self.made = int(row["ground_truth"]), 0
        if not 0 <= self.number <= self.highest:
            raise ValueError(f"the ground truth is {self.number}, but agent.kwargs.highest is {self.highest}")

    def step(self, message):
        self.made += 1
        # Only one guess, and nothing else, so that a list of all numbers is not a guess.
        guess, done, parts = GUESS.fullmatch(message.text.strip()), self.made == self.turns, {"acc": 0}
        if guess is None:
            return Observation("Write only your guess, such as Guess: 7", done=done, reward=-1.0, parts=parts)
        value = int(guess[1])
        if value == self.number:
            return Observation(done=True, reward=1.0, parts={"acc": 1})
        return Observation("Too low" if value < self.number else "Too high", done=done, reward=0.0, parts=parts)
