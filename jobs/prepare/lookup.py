"""Prompts for chained lookups: from a number, follow a table for some steps (`examples/agents/lookup.py` has the table
and the tool).

Each episode has another table, so only tool calls can give the answer. The test file has each number once with each
number of steps. Questions in the conversations of the warm start have one step, and some of these conversations make
more calls than that: the policy must learn how many calls a question needs.
"""

import argparse
import random
from collections.abc import Iterator
from typing import Any

from jobs.prepare import agent_task
from jobs.prepare.agent_task import Messages, Question, assistant, call, result, user

help = "follow a table that only a tool can read, for one to three steps"

KEYS = range(10, 100)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "description": "The number that the table has at a key.",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "integer", "description": "a number of two digits"}},
                "required": ["key"],
            },
        },
    }
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m jobs.prepare lookup`."""
    agent_task.add_arguments(
        parser,
        20_000,
        8_000,
        ("--steps", int, 3, "most steps of a question"),
        ("--extra", float, 0.5, "chance of each extra lookup in the warm start, after the requested one"),
    )


def prepare(args: argparse.Namespace) -> None:
    """Write the files. After an error, older files are unchanged."""
    agent_task.check(args, steps=1)
    draw = random.Random(f"lookup {args.seed}")
    tests = [_question(key, steps) for steps in range(1, args.steps + 1) for key in KEYS]
    trains = [_question(draw.choice(KEYS), draw.randint(1, args.steps)) for _ in range(args.train)]
    agent_task.write(args, "lookup", {"test": tests, "train": trains}, _conversations(args, draw), TOOLS)


def _question(key: int, steps: int) -> Question:
    return f"From {key} take {steps}.", f"{key} {steps}"


def _conversations(args: argparse.Namespace, draw: random.Random) -> Iterator[Messages]:
    while True:
        key = draw.choice(KEYS)
        text, _ = _question(key, 1)
        messages = [user(text)]
        for step in range(args.steps):
            if step and draw.random() >= args.extra:
                break
            messages.append(call("get", key=key))
            key = draw.choice(KEYS)
            messages.append(result(str(key)))
        yield [*messages, assistant(str(key))]
