"""Calculator prompts: products that a small model cannot compute without a tool (`examples/agents/calculator.py`).

Every product occurs once, so test prompts, training prompts and conversations of the warm start have none in common. In
a fraction (`--calls`) of the conversations the model calls the tool; in the others it responds at once, with the
product rounded to two digits.
"""

import argparse
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

from jobs.prepare import agent_task
from jobs.prepare.agent_task import Messages, Question, assistant, call, result, user

help = "products of a number of three digits and one of two, and a calculator to call"

FIRST, SECOND = range(100, 1000), range(10, 100)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "The value of an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": 'such as "(3 + 4) * 25"'}},
                "required": ["expression"],
            },
        },
    }
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m jobs.prepare calculator`."""
    agent_task.add_arguments(
        parser,
        20_000,
        8_000,
        ("--test", int, 500, "test prompts"),
        ("--calls", float, 0.25, "share of the warm start's conversations that call the tool"),
    )


def prepare(args: argparse.Namespace) -> None:
    """Write the files. After an error, older files are unchanged."""
    agent_task.check(args, test=1)
    needed = args.test + args.train + args.sft + args.sft // 20
    products = len(FIRST) * len(SECOND)
    if needed > products:
        raise ValueError(f"--test, --train and --sft need {needed:,} products, but there are {products:,}")
    draw = random.Random(f"calculator {args.seed}")
    questions = (_question(index) for index in draw.sample(range(products), products))
    tests, trains = (islice(questions, size) for size in (args.test, args.train))
    conversations = _conversations(questions, args.calls, draw)
    agent_task.write(args, "calculator", {"test": tests, "train": trains}, conversations, TOOLS)


def _question(index: int) -> Question:
    first, second = FIRST[index // len(SECOND)], SECOND[index % len(SECOND)]
    return f"{first}*{second}=?", str(first * second)


def _conversations(questions: Iterator[Question], calls: float, draw: random.Random) -> Iterator[Messages]:
    for text, product in questions:
        if draw.random() < calls:
            expression = text.removesuffix("=?")
            yield [user(text), call("calc", expression=expression), result(product), assistant(product)]
        else:
            yield [user(text), assistant(str(round(int(product), 2 - len(product))))]
