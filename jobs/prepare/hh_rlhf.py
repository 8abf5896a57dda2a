"""HH-RLHF prompts, and files for SFT and reward models.

A row has two dialogues, `chosen` and `rejected`, as text with `Human:` and `Assistant:`. The files of each split are

- `train.parquet`: prompts in verl's format. A prompt is the common beginning of both dialogues, up to a human's turn.
  There is not a built-in rule for them: a reward model or a function of your own must score the responses. The ground
  truth is the chosen response.
- `sft_train.parquet`: the chosen dialogue as `messages`.
- `rm_train.parquet`: `prompt`, and the messages after it in `chosen` and in `rejected`.

Templates of the prompt: `chat` has a message for each turn; `verl` has the text of the dialogue so far in one message,
as in verl's files. Rows without a preference are left out and counted: the dialogues are equal, have no common
beginning, or one has no response.
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
    """A prompt, which ends with a user message, and the messages of two continuations."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def prompts(dialogues: Placed, split: str, args: argparse.Namespace) -> Iterator[dict[str, Any] | None]:
    """Yield prompt rows in verl's format; None for a row without a preference."""
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
    """Return an iterator over rows for SFT with the chosen dialogues; None for a row without a preference."""
    return (pair and {"messages": [*pair.prompt, *pair.chosen]} for pair in pairs(dialogues))


def preferences(dialogues: Placed, split: str, args: argparse.Namespace) -> Iterator[dict[str, Any] | None]:
    """Return an iterator over rows for reward models; None for a row without a preference."""
    return (pair and pair._asdict() for pair in pairs(dialogues))


def pairs(dialogues: Placed) -> Iterator[Pair | None]:
    """Yield a pair for each row; None for a row without a preference. Errors name file and line of the row."""
    for where, row in dialogues:
        yield pair_of(*(dialogue(row[key], f"{where}: {key!r}") for key in ("chosen", "rejected")))


def dialogue(text: str, where: str) -> list[Message]:
    """Split the text of a dialogue into messages; successive turns of the same speaker become one message.

    `where` begins the text of errors.
    """
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
    """Split two dialogues into their common prompt and two continuations; None if these are equal or one is missing."""
    same = len(list(itertools.takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))))
    while same and chosen[same - 1]["role"] != "user":
        same -= 1
    pair = Pair(chosen[:same], chosen[same:], rejected[same:])
    for messages in (pair.chosen, pair.rejected):
        if not messages or messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
            return None
    return pair if pair.prompt and pair.chosen != pair.rejected else None


def as_text(prompt: list[Message]) -> str:
    """Return a prompt as one text in the form of the data set, which ends with `Assistant:`."""
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
