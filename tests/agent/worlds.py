"""Environments and tools of the tests, as users write them."""

import random

from pipeline.agent import Environment, Observation, ToolError, tool


class HigherLower(Environment):
    def __init__(self, most: int = 63) -> None:
        self.most = most

    def reset(self, row, seed):
        self.number = random.Random(seed).randint(1, self.most)
        self.left = 6
        return f"Guess a number from 1 to {self.most}, {row['ground_truth']}."

    def step(self, message):
        self.left -= 1
        guess = int(message.text)
        if guess == self.number:
            return Observation(done=True, reward=1.0, parts={"acc": 1})
        return Observation("higher" if guess < self.number else "lower", done=self.left == 0)


class Dice(Environment):
    def reset(self, row, seed):
        return f"{random.random()} {self.numpy()}"

    def numpy(self):
        import numpy

        return numpy.random.random()


class Coroutines(Environment):
    async def reset(self, row, seed):
        import asyncio

        await asyncio.sleep(0)
        self.loop = asyncio.get_running_loop()
        return [{"role": "user", "content": "begin"}]

    async def step(self, message):
        import asyncio

        assert asyncio.get_running_loop() is self.loop
        return f"{message.reasoning}{message.calls[0].arguments['x']}{message.truncated}"


@tool(timeout_s=2)
def calc(expression: str) -> str:
    """The value of an arithmetic expression.

    Args:
        expression: such as "(3 + 4) * 25".
    """
    if len(expression) > 10:
        raise ToolError("too long")
    return str(sum(int(number) for number in expression.split("+")))


@tool(name="count")
async def counter(step: int = 1) -> int:
    """Count the calls of an episode."""
    counter.calls = getattr(counter, "calls", 0) + step
    return counter.calls


def plain(values: list[float]) -> dict:
    """The sum of some values."""
    return {"sum": sum(values)}
