"""HH-RLHF prompts, and files for SFT and reward models, from the data set's own `train.jsonl.gz` and `test.jsonl.gz`.

A line has two dialogues, `chosen` and `rejected`, as text with `Human:` and `Assistant:`. Of each split are written

- `train.parquet`: the prompt, which is what both have in common up to a human's words, in verl's format. There is no
  rule for its data source: a reward model or a function of your own scores it. The ground truth is the chosen response.
- `sft_train.parquet`: the chosen dialogue as `messages`.
- `rm_train.parquet`: `prompt`, and `chosen` and `rejected` with the messages behind it.

Templates of the prompt: `chat` has a message for each turn; `verl` has the text of the dialogue so far in one message,
as verl's files have.

The data set itself has dialogues that prefer nothing: those without a response on one side, without a common beginning,
or with two equal sides are left out, and counted.
"""

import argparse
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.prepare import jsonl, parquet

HELP = "dialogues with a preferred and a rejected answer, also as SFT and reward-model files"

DATA_SOURCE = "Dahoas/full-hh-rlhf"
TEMPLATES = ("chat", "verl")
SPLITS = ("train", "test")
NAMES = {f"{split}{ending}": split for split in SPLITS for ending in (".jsonl.gz", ".jsonl")}
ROLES = {"Human": "user", "Assistant": "assistant"}

SCHEMA = parquet.prompt_schema(ground_truth=pa.string(), extra_info=[])
PAIRS = pa.schema([("prompt", parquet.MESSAGES), ("chosen", parquet.MESSAGES), ("rejected", parquet.MESSAGES)])

Message = dict[str, str]

_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")


class Pair(NamedTuple):
    """A prompt, which ends with the human's words, and two ways to go on."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m jobs.prepare hh_rlhf`."""
    add = parser.add_argument
    add("--input", type=Path, nargs="+", required=True, metavar="PATH", help="the data set's files, train.jsonl.gz and "
        "test.jsonl.gz (or .jsonl), or folders that hold them, such as the data set's own with helpful-base and "
        "the like in it")  # fmt: skip
    add("--out", type=Path, required=True, metavar="DIR", help="folder for train.parquet, sft_train.parquet, "
        "rm_train.parquet and the same of test (replaced)")  # fmt: skip
    add("--template", choices=TEMPLATES, default=TEMPLATES[0], help="chat: a message for each turn; verl: the dialogue "
        "as the text of one message (default: %(default)s)")  # fmt: skip


def prepare(args: argparse.Namespace) -> None:
    """Writes three parquet files for each split there is.

    Raises:
        ValueError: the input is missing or not HH-RLHF's; files that were there before are untouched.
        OSError: the folder cannot be written; files that were there before are untouched.
    """
    files = find(args.input)
    counts: dict[str, int] = {}
    left_out: dict[str, int] = {}
    with parquet.together(args.out) as folder:
        for split, some in files.items():
            parquet.write(folder / f"{split}.parquet", SCHEMA, rows(some, split, args.template))
            parquet.write(folder / f"sft_{split}.parquet", parquet.SFT, _sft(some))
            parquet.write(folder / f"rm_{split}.parquet", PAIRS, (pair._asdict() for pair in pairs(some) if pair))
            counts[split] = pq.read_metadata(folder / f"rm_{split}.parquet").num_rows
            left_out[split] = sum(1 for pair in pairs(some) if pair is None)
            if not counts[split]:
                raise ValueError(f"{', '.join(map(str, some))}: no dialogues with two different responses")
    for split, count in counts.items():
        note = f" ({left_out[split]:,} without two different responses to one prompt left out)"
        for name in (split, f"sft_{split}", f"rm_{split}"):
            print(f"{args.out / name}.parquet: {count:,} dialogues{note if left_out[split] else ''}")


def find(inputs: list[Path]) -> dict[str, list[Path]]:
    """The files of each split.

    Raises:
        ValueError: a path does not exist or is named otherwise, or a folder and its folders hold no such file.
    """
    found: dict[str, list[Path]] = {}
    for given in inputs:
        folders = [given, *sorted(path for path in given.iterdir() if path.is_dir())] if given.is_dir() else []
        inside = [folder for folder in folders if any((folder / name).is_file() for name in NAMES)]
        for place in inside or [given]:
            for split, file in jsonl.find([place], NAMES).items():
                if file not in found.setdefault(split, []):
                    found[split].append(file)
    return found


def rows(files: list[Path], split: str, template: str) -> Iterator[dict[str, Any]]:
    """Prompts in verl's format.

    Raises:
        ValueError: a file cannot be read, or a line is no pair of dialogues; the sentence names file and line.
    """
    for index, pair in enumerate(pair for pair in pairs(files) if pair):
        prompt = pair.prompt if template == "chat" else [{"role": "user", "content": as_text(pair.prompt)}]
        yield {
            "data_source": DATA_SOURCE,
            "prompt": prompt,
            "ability": "alignment",
            "reward_model": {"style": "model", "ground_truth": pair.chosen[-1]["content"]},
            "extra_info": {"split": split, "index": index},
        }


def _sft(files: list[Path]) -> Iterator[dict[str, list[Message]]]:
    return ({"messages": [*pair.prompt, *pair.chosen]} for pair in pairs(files) if pair)


def pairs(files: list[Path]) -> Iterator[Pair | None]:
    """A pair for each line that is not blank, None where the two dialogues prefer nothing.

    Raises:
        ValueError: a file cannot be read, or a line is no pair of dialogues; the sentence names file and line.
    """
    for file in files:
        for where, line in jsonl.objects(file, ("chosen", "rejected")):
            yield pair_of(*(dialogue(line[key], f"{where}: {key!r}") for key in ("chosen", "rejected")))


def dialogue(text: str, where: str) -> list[Message]:
    """The messages of a dialogue; turns of one speaker after the other are one message.

    Raises:
        ValueError: the text does not begin with the human.
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
    """Prompt and responses of two dialogues, None where they do not differ in responses to one prompt."""
    same = len(list(takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))))
    while same and chosen[same - 1]["role"] != "user":
        same -= 1
    pair = Pair(chosen[:same], chosen[same:], rejected[same:])
    for messages in (pair.chosen, pair.rejected):
        if not messages or messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
            return None
    return pair if pair.prompt and pair.chosen != pair.rejected else None


def as_text(prompt: list[Message]) -> str:
    """A prompt as the data set writes dialogues, up to the assistant's turn."""
    names = {role: speaker for speaker, role in ROLES.items()}
    return "".join(f"\n\n{names[one['role']]}: {one['content']}" for one in prompt) + "\n\nAssistant:"
