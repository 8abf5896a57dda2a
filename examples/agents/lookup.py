"""A table that only a tool can read: `make demo TASK=lookup`.

    python -m jobs.train agent.environment=examples/agents/lookup.py:Lookup data.train_files=...

The rows come from `python -m jobs.prepare lookup`; their ground truth is the first key and the number of steps. A tool
that is a method knows the episode: here the table, which `reset` makes.
"""

import random

from pipeline.agent import Environment, Observation, ToolError, tool

KEYS = range(10, 100)


class Lookup(Environment):
    """A table from numbers to numbers, another one in each episode. An answer without a call ends the episode.

    Args:
        blind: the tool returns a dot, which shows how far a player comes without the table.
    """

    def __init__(self, blind: bool = False):
        self.blind = blind

    def reset(self, row, seed):
        key, steps = map(int, row["ground_truth"].split())
        draw = random.Random(seed)
        self.table = {start: draw.choice(KEYS) for start in KEYS}
        for _ in range(steps):
            key = self.table[key]
        self.answer = key

    @tool
    def get(self, key: int) -> str:
        """The number that the table has at a key.

        Args:
            key: a number of two digits
        """
        if key not in self.table:
            raise ToolError("no such key")
        return "." if self.blind else str(self.table[key])

    def step(self, message):
        right = message.text.strip() == str(self.answer)
        return Observation(done=True, reward=float(right), parts={"acc": int(right)})
