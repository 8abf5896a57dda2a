"""An environment, tools and a program that say anything, texts of control tokens among it (`CONTROLS`).

`random` begins at the seed of the episode.
"""

import asyncio
import os
import random

from pipeline.agent import Environment, Observation, ToolError, tool

CONTROLS = os.environ.get("CONTROLS", "").split() or [""]
PIECES = [
    "higher",
    " lower",
    "",
    "  x  ",
    "\n",
    "\n\n",
    "a\n\nb\n",
    "12 3.5",
    "7",
    "é",
    " 中",
    "😀",
    "﷽",
    "\u200d",
    "\ud800",
]
PIECES += [
    '{"a": [1, "b"]}',
    '"',
    "\\",
    "<",
    "|>",
    "<|",
    "user\n",
    "assistant\n",
    "<think>",
    "</s>",
    "{{ x }}",
    "\t",
    "\0",
]


def anything():
    """A text: empty, short, long, of any characters, or with control tokens in it."""
    kind = random.random()
    if kind < 0.08:
        return ""
    if kind < 0.16:
        return (random.choice([*PIECES, *CONTROLS]) * 250)[: random.randint(20, 250)]
    if kind < 0.26:
        return "".join(chr(random.randrange(1, 0x3000)) for _ in range(random.randint(1, 12)))
    if kind < 0.36:
        return "".join(random.choices(CONTROLS, k=random.randint(1, 6)))
    return "".join(random.choice([random.choice(PIECES), random.choice(CONTROLS)]) for _ in range(random.randint(1, 8)))


class Talk(Environment):
    """Goes on with one message, or several where the template writes them, and fails at times."""

    def __init__(self, opens=True, several=True):
        self.opens, self.several = opens, several

    def reset(self, row, seed):
        text = anything()
        return random.choice([None, text, [{"role": "user", "content": text}]]) if self.opens else None

    def step(self, message):
        kind = random.random()
        if kind < 0.02:
            raise ValueError("it fails" + random.choice(["", "x" * 5_000_000]))
        content = anything()
        if self.several and kind < 0.2:
            content = [{"role": "user", "content": content}, {"role": "user", "content": anything()}]
        return Observation(content, done=kind > 0.93, reward=random.choice([None, 0.5, -1.0]))


@tool
def calc(expression: str, digits: int = 0) -> str:
    """The value of an expression."""
    if random.random() < 0.2:
        raise ToolError(anything() * random.choice([1, 1, 1, 100_000]))
    return anything()


@tool
def get(keys: list) -> str:
    """Values of keys."""
    return anything()


async def run(row, chat):
    """Several conversations, taken up again at random, two of them at the same time."""
    tools, conversations = row["extra_info"]["tools"], []

    def user(text):
        return {"role": "user", "content": text}

    async def go_on(conversation):
        answer = await chat(conversation, tools=tools)
        conversation.append(answer)
        results = [{"role": "tool", "tool_call_id": call.id, "content": anything()} for call in answer.calls]
        conversation.extend(results)
        if not results or random.random() < 0.3:
            conversation.append(user(anything()))

    for _ in range(random.randint(1, 3)):
        if len(conversations) < 3 and random.random() < 0.7:
            earlier = [{"role": "assistant", "content": anything()}, user(anything())] * (random.random() < 0.3)
            conversations.append([user(f"begin {len(conversations)}: {anything()}"), *earlier])
        if conversations:
            both = random.sample(conversations, k=min(len(conversations), random.randint(1, 2)))
            await asyncio.gather(*(go_on(conversation) for conversation in both))
    if not conversations:
        await go_on([user(f"begin 0: {anything()}")])
    return 1.0
