"""Write the files of a synthetic multi-turn task: prompts in verl's format, and conversations for supervised training
before reinforcement learning (warm start)."""

import argparse
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from jobs.prepare import parquet
from pipeline.config.paths import local_path

FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
CALL = pa.struct([("type", pa.string()), ("function", FUNCTION)])
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(CALL))]))
SFT = pa.schema([("messages", MESSAGES), ("tools", pa.string())])
"""Schema of the files with conversations. Arguments of tool calls, and schemas of tools, are JSON text."""
SCHEMA = parquet.prompt_schema([("ground_truth", pa.string())], [])

Option = tuple[str, Any, Any, str]
Question = tuple[str, str]
"""(Text of the prompt, ground truth)."""
Messages = list[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser, train: int, sft: int, *options: Option) -> None:
    """Add `--out`, `--train`, `--sft` and `--seed`, and further `options`.

    Args:
        parser: the parser.
        train: default of `--train`, the number of training prompts.
        sft: default of `--sft`, the number of conversations.
        options: further options, each as (name, type, default, help).
    """
    text = "folder for train.parquet, test.parquet, sft_train.parquet and sft_test.parquet (replaced)"
    parser.add_argument("--out", type=local_path, required=True, metavar="DIR", help=text)
    common = (
        ("--train", int, train, "training prompts"),
        ("--sft", int, sft, "conversations in sft_train.parquet; sft_test.parquet has a twentieth of them"),
        ("--seed", int, 0, "the same options and seed give the same rows"),
    )
    for name, kind, default, text in (*common, *options):
        parser.add_argument(name, type=kind, default=default, help=f"{text} (default: %(default)s)")


def check(args: argparse.Namespace, **lowest: int) -> None:
    """Raise ValueError if an option is below its minimum in `lowest`, or a float option is not between 0 and 1."""
    for name, least in {"train": 1, "sft": 20, "seed": 0, **lowest}.items():
        if getattr(args, name) < least:
            raise ValueError(f"--{name} is {getattr(args, name)}, but must be at least {least}")
    for name, value in vars(args).items():
        if isinstance(value, float) and not 0 <= value <= 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}, but must be a share from 0 to 1")


def write(
    args: argparse.Namespace,
    data_source: str,
    questions: dict[str, Iterable[Question]],
    conversations: Iterator[Messages],
    tools: list[dict[str, Any]] | None = None,
) -> None:
    """Write the files of a task. After an error, older files are unchanged.

    Args:
        args: options of `add_arguments`.
        data_source: `data_source` of the rows.
        questions: questions by split.
        conversations: endless iterator of conversations.
        tools: schemas of the tools that the conversations call; None without tools.
    """
    sizes = {}
    with parquet.together(args.out) as folder:
        for split, some in questions.items():
            rows = (_row(data_source, split, index, question) for index, question in enumerate(some))
            sizes[split], _ = parquet.write(folder / f"{split}.parquet", SCHEMA, rows)
        schemas = json.dumps(tools) if tools else None
        for name, size in (("sft_test", args.sft // 20), ("sft_train", args.sft)):
            solved = ({"messages": next(conversations), "tools": schemas} for _ in range(size))
            sizes[name], _ = parquet.write(folder / f"{name}.parquet", SFT, solved)
    for name, size in sizes.items():
        print(f"{args.out / name}.parquet: {size:,} rows")


def _row(data_source: str, split: str, index: int, question: Question) -> dict[str, Any]:
    text, truth = question
    return {
        "data_source": data_source,
        "prompt": [user(text)],
        "ability": "agent",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index},
    }


def user(text: str) -> dict[str, Any]:
    """Return a user message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    """Return an assistant message without a tool call."""
    return {"role": "assistant", "content": text}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """Return an assistant message with one tool call and no text."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def result(text: str) -> dict[str, Any]:
    """Return a message with the result of a tool."""
    return {"role": "tool", "content": text}
