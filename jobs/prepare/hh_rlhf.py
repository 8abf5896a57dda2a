"""HH-RLHF prompts, and files for SFT and reward models.

A row has two dialogues, `chosen` and `rejected`, as text with `Human:` and `Assistant:`. The files of each split are

- `train.parquet`: the prompt, which is the common beginning of both up to a human's words, in verl's format. Its data
  source has no rule: a reward model or a function of your own scores it. The ground truth is the chosen response.
- `sft_train.parquet`: the chosen dialogue as `messages`.
- `rm_train.parquet`: `prompt`, and the messages after it in `chosen` and in `rejected`.

Templates of the prompt: `chat` has a message for each turn; `verl` has the text of the dialogue so far in one message,
as verl's files have. Rows that prefer nothing are left out and counted: they lack a response on one side or a common
beginning, or have two equal sides.
"""

import argparse
import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from jobs.prepare import parquet
from jobs.prepare.hub import HubData, Placed

ROLES = {"Human": "user", "Assistant": "assistant"}
SCHEMA = parquet.prompt_schema([("ground_truth", pa.string())], [])
PAIRS = pa.schema([("prompt", parquet.MESSAGES), ("chosen", parquet.MESSAGES), ("rejected", parquet.MESSAGES)])

Message = dict[str, str]
_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")


class Pair(NamedTuple):
    """A prompt, which ends with the human's words, and two continuations."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def prompts(dialogues: Placed, split: str, args: argparse.Namespace) -> Iterator[dict[str, Any] | None]:
    """Yield prompts in verl's format."""
    count = itertools.count()
    for pair in pairs(dialogues):
        if pair is None:
            yield None
            continue
        prompt = pair.prompt if args.template == "chat" else [{"role": "user", "content": as_text(pair.prompt)}]
        yield {
            "data_source": "Dahoas/full-hh-rlhf",
            "prompt": prompt,
            "ability": "alignment",
            "reward_model": {"style": "model", "ground_truth": pair.chosen[-1]["content"]},
            "extra_info": {"split": split, "index": next(count)},
        }


def conversations(dialogues: Placed, split: str, args: argparse.Namespace) -> Iterator[dict[str, Any] | None]:
    """Return the chosen dialogues for SFT."""
    return (pair and {"messages": [*pair.prompt, *pair.chosen]} for pair in pairs(dialogues))


def preferences(dialogues: Placed, split: str, args: argparse.Namespace) -> Iterator[dict[str, Any] | None]:
    """Return pairs for reward models."""
    return (pair and pair._asdict() for pair in pairs(dialogues))


def pairs(dialogues: Placed) -> Iterator[Pair | None]:
    """Yield a pair for each row, None for a row whose two dialogues prefer nothing; errors name the place of a row."""
    for where, row in dialogues:
        yield pair_of(*(dialogue(row[key], f"{where}: {key!r}") for key in ("chosen", "rejected")))


def dialogue(text: str, where: str) -> list[Message]:
    """Split a dialogue, which the human begins, into messages; successive turns of one speaker are one message."""
    parts = _TURN.split(text.strip())
    if parts[0] or len(parts) < 3 or parts[1] != "Human":
        raise ValueError(f"{where} must begin with 'Human:' and have turns of 'Human:' and 'Assistant:'")
    messages: list[Message] = []
    for speaker, words in zip(parts[1::2], parts[2::2], strict=True):
        if messages and messages[-1]["role"] == ROLES[speaker]:
            messages[-1]["content"] = f"{messages[-1]['content']}\n\n{words.strip()}".strip()
        else:
            messages.append({"role": ROLES[speaker], "content": words.strip()})
    return messages


def pair_of(chosen: list[Message], rejected: list[Message]) -> Pair | None:
    """Split two dialogues into prompt and responses; None if they are not two different responses to one prompt."""
    same = len(list(itertools.takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))))
    while same and chosen[same - 1]["role"] != "user":
        same -= 1
    pair = Pair(chosen[:same], chosen[same:], rejected[same:])
    for messages in (pair.chosen, pair.rejected):
        if not messages or messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
            return None
    return pair if pair.prompt and pair.chosen != pair.rejected else None


def as_text(prompt: list[Message]) -> str:
    """Write a prompt as the data set writes dialogues, up to the assistant's turn."""
    names = {role: speaker for speaker, role in ROLES.items()}
    return "".join(f"\n\n{names[turn['role']]}: {turn['content']}" for turn in prompt) + "\n\nAssistant:"


DATA = HubData(
    help="dialogues with a preferred and a rejected answer, also as SFT and reward-model files",
    origin="Anthropic/hh-rlhf",
    keys=("chosen", "rejected"),
    outputs={"": (SCHEMA, prompts), "sft_": (parquet.SFT, conversations), "rm_": (PAIRS, preferences)},
    noun="dialogues",
    many_folders=True,
    option=("--template", ("chat", "verl"), "chat: a message for each turn; verl: the dialogue as text of one message"),
)
