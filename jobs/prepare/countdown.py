"""Countdown prompts: reach a target number from three or four given numbers.

The puzzles come from one stream without duplicates (`puzzles.py`): first those of `test.parquet`, then `train.parquet`,
then the SFT files, so no puzzle occurs in two of them or twice in one, `test.parquet` does not depend on `--train`, and
neither of the two depends on `--sft`.

Templates (the wording of the task is TinyZero's):
- `base` is TinyZero's conversation text for base models, which ends inside an opened `<think>`. Prompts are chat
  messages here, so it is the content of a single user message: give the model a chat template that prints contents
  and nothing else, or the text is wrapped into another conversation.
- `chat` is the task as a plain user message, for instruction-tuned models; the model opens `<think>` itself.
- `short` is `Numbers: 3 7 25. Target: 46.`, for tiny policies that learn the form of the answer from the SFT files.
"""

import argparse
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jobs.prepare import parquet
from jobs.prepare.puzzles import COUNTS, Puzzle, Ranges, puzzles

HELP = "arithmetic puzzles: reach a target from given numbers"

TASK = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
    "(+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. And return the final "
    "answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
)
BASE = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer.\n"
    f"User: {TASK}\n"
    "Assistant: Let me solve this step by step.\n<think>"
)
SHORT = "Numbers: {spaced}. Target: {target}."
TEMPLATES = {"base": BASE, "chat": TASK, "short": SHORT}

SCHEMA = parquet.prompt_schema(
    ground_truth=pa.struct([("target", pa.int64()), ("numbers", pa.list_(pa.int64()))]),
    extra_info=[("solution", pa.string())],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m jobs.prepare countdown`."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder for train.parquet and test.parquet (replaced)")
    add("--train", type=int, default=50_000, metavar="N", help="training puzzles (default: %(default)s)")
    add("--test", type=int, default=1_000, metavar="M", help="test puzzles (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="S", help="same options and seed, same rows (default: %(default)s)")
    add("--template", choices=TEMPLATES, default="chat", help="base: TinyZero's text for base models, as one user "
        "message; chat: the task as a user message; short: a line for tiny models (default: %(default)s)")  # fmt: skip
    add("--numbers", type=_integers, default=(3, 4), metavar="K,..", help="how many numbers a puzzle has, of "
        f"{', '.join(map(str, COUNTS))} (default: 3,4)")  # fmt: skip
    add("--mix", type=_shares, metavar="P,..", help="shares of the sizes in --numbers (default: equal)")
    for end, of in (("min", "number"), ("max", "number"), ("min", "target"), ("max", "target")):
        add(f"--{end}-{of}", type=int, default=getattr(Ranges, f"{end}_{of}"), metavar="X",
            help=f"{'smallest' if end == 'min' else 'largest'} {of} (default: %(default)s)")  # fmt: skip
    add("--sft", type=int, default=0, metavar="K", help="also write sft_train.parquet and sft_test.parquet with K "
        "solved puzzles for training, none of them in train.parquet or test.parquet")  # fmt: skip
    add("--sft-test", type=int, metavar="L", help="solved puzzles in sft_test.parquet (default: 5%% of --sft)")
    add("--sft-solution", choices=("steps", "answer"), default="steps", help="steps: <think> with the steps, then "
        "<answer>; answer: <answer> alone (default: %(default)s)")  # fmt: skip


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _shares(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


_integers.__name__, _shares.__name__ = "list of whole numbers", "list of numbers"  # named by argparse's messages


def prepare(args: argparse.Namespace) -> None:
    """Writes the files.

    Raises:
        ValueError: an option has a value that cannot be; nothing was written.
        OSError: the folder cannot be written; files that were there before are untouched.
    """
    ranges = Ranges(args.min_number, args.max_number, args.min_target, args.max_target)
    mix = args.mix or (1.0,) * len(args.numbers)
    sft_test = max(1, args.sft // 20) if args.sft_test is None else args.sft_test
    _check(args, mix, sft_test)
    ranges.check(args.numbers)

    sizes = {"test": args.test, "train": args.train}
    if args.sft:
        sizes |= {"sft_test": sft_test, "sft_train": args.sft}
    stream = puzzles(args.numbers, mix, ranges, args.seed)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress, parquet.together(args.out) as folder:
        tasks = {name: progress.add_task(name, total=size) for name, size in sizes.items()}
        for name, size in sizes.items():
            some = progress.track(islice(stream, size), task_id=tasks[name], total=size)
            if name.startswith("sft"):
                solved = ({"messages": messages(puzzle, args.template, args.sft_solution)} for puzzle in some)
                parquet.write(folder / f"{name}.parquet", parquet.SFT, solved)
            else:
                parquet.write(folder / f"{name}.parquet", SCHEMA, rows(some, name, args.template))
    for name, size in sizes.items():
        print(f"{args.out / name}.parquet: {size:,} puzzles")
    for name in ("sft_train", "sft_test"):
        if name not in sizes and (args.out / f"{name}.parquet").exists():
            console.print(f"{args.out / name}.parquet is from an earlier run and may share puzzles with these files")


def _check(args: argparse.Namespace, mix: tuple[float, ...], sft_test: int) -> None:
    for option, value, least in (
        ("--train", args.train, 1),
        ("--test", args.test, 1),
        ("--sft", args.sft, 0),
        ("--sft-test", sft_test, 1),
        ("--seed", args.seed, 0),
    ):
        if value < least:
            raise ValueError(f"{option} is {value}, but must be at least {least}")
    if len(set(args.numbers)) < len(args.numbers) or not set(args.numbers) <= set(COUNTS):
        given = ",".join(map(str, args.numbers))
        raise ValueError(f"--numbers is {given}, but must list different values of {', '.join(map(str, COUNTS))}")
    if len(mix) != len(args.numbers) or not all(0 < share < float("inf") for share in mix):
        given = ",".join(f"{share:g}" for share in mix)
        raise ValueError(
            f"--mix is {given}, but must hold one share above 0 for each of the {len(args.numbers)} --numbers"
        )
    if args.sft and args.sft_solution == "answer" and args.template == "base":
        raise ValueError("--sft-solution answer does not fit --template base, whose prompt opens <think>; use steps")


def prompt(puzzle: Puzzle, template: str) -> list[dict[str, str]]:
    """The chat messages that pose the puzzle."""
    numbers = list(puzzle.numbers)
    text = TEMPLATES[template].format(numbers=numbers, spaced=" ".join(map(str, numbers)), target=puzzle.target)
    return [{"role": "user", "content": text}]


def rows(some: Iterable[Puzzle], split: str, template: str) -> Iterator[dict[str, Any]]:
    """Rows in verl's format."""
    for index, puzzle in enumerate(some):
        yield {
            "data_source": "countdown",
            "prompt": prompt(puzzle, template),
            "ability": "math",
            "reward_model": {
                "style": "rule",
                "ground_truth": {"target": puzzle.target, "numbers": list(puzzle.numbers)},
            },
            "extra_info": {"split": split, "index": index, "solution": puzzle.solution},
        }


def messages(puzzle: Puzzle, template: str, solution: str) -> list[dict[str, str]]:
    """The puzzle and its worked solution, as a conversation."""
    content = f"<answer> {puzzle.solution} </answer>"
    if solution == "steps":
        content = f"<think> {puzzle.steps} </think>\n{content}"
    if template == "base":
        content = content.removeprefix("<think>")  # the prompt has opened it
    return [*prompt(puzzle, template), {"role": "assistant", "content": content}]
