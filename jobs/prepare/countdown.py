"""Countdown prompts: reach a target number from three or four given numbers.

The puzzles come from one stream without duplicates (`puzzles.py`): first for `test.parquet`, then for `train.parquet`,
then for the SFT files. So no puzzle occurs twice, `test.parquet` does not depend on `--train`, and both do not depend
on `--sft`.

Templates (the text of the task is the same as in TinyZero):
- `base` is TinyZero's conversation text for base models, which ends with an open `<think>`. It is the content of a
  single user message, so the model needs a chat template that writes only contents.
- `chat` is the task as a plain user message, for instruction-tuned models; the model opens `<think>` itself.
- `short` is `Numbers: 3 7 25. Target: 46.`, for tiny policies that learn the form of the answer from the SFT files.
"""

import argparse
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.progress import track

from jobs.prepare import parquet
from jobs.prepare.puzzles import COUNTS, Puzzle, Ranges, puzzles
from pipeline.config.paths import local_path

help = "arithmetic puzzles: reach a target from given numbers"

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

TRUTH = pa.struct([("target", pa.int64()), ("numbers", pa.list_(pa.int64()))])
SCHEMA = parquet.prompt_schema([("ground_truth", TRUTH)], [("solution", pa.string())])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m jobs.prepare countdown`."""

    def add(option: str, kind: Any, default: Any, text: str, **more: Any) -> None:
        parser.add_argument(option, type=kind, default=default, help=f"{text} (default: %(default)s)", **more)

    out_text = "folder for train.parquet and test.parquet (replaced)"
    parser.add_argument("--out", type=local_path, required=True, metavar="DIR", help=out_text)
    add("--train", int, 50_000, "training puzzles")
    add("--test", int, 1_000, "test puzzles")
    add("--seed", int, 0, "the same options and seed give the same rows")
    add("--template", str, "chat", "wording for base models, chat models, or tiny models", choices=TEMPLATES)
    add("--numbers", _integers, (3, 4), f"how many numbers a puzzle has, of {', '.join(map(str, COUNTS))}")
    add("--mix", _shares, None, "shares of the sizes in --numbers; none makes them equal")
    add("--min-number", int, Ranges.min_number, "smallest number")
    add("--max-number", int, Ranges.max_number, "largest number")
    add("--min-target", int, Ranges.min_target, "smallest target")
    add("--max-target", int, Ranges.max_target, "largest target")
    add("--sft", int, 0, "solved puzzles in sft_train.parquet, none of them in train.parquet or test.parquet")
    add("--sft-test", int, None, "solved puzzles in sft_test.parquet; none makes 5%% of --sft")
    solutions = ("steps", "answer")
    add("--sft-solution", str, "steps", "<think> with the steps and <answer>, or <answer> alone", choices=solutions)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _shares(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


_integers.__name__, _shares.__name__ = "list of whole numbers", "list of numbers"  # named by argparse's messages


def prepare(args: argparse.Namespace) -> None:
    """Write the files. After an error, older files are unchanged."""
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
    with parquet.together(args.out) as folder:
        for name, size in sizes.items():
            hidden = not console.is_terminal
            some = track(islice(stream, size), name, size, console=console, transient=True, disable=hidden)
            path = folder / f"{name}.parquet"
            if name.startswith("sft"):
                solved = ({"messages": messages(puzzle, args.template, args.sft_solution)} for puzzle in some)
                parquet.write(path, parquet.SFT, solved)
            else:
                parquet.write(path, SCHEMA, rows(some, name, args.template))
    for name, size in sizes.items():
        print(f"{args.out / name}.parquet: {size:,} puzzles")
    for name in ("sft_train", "sft_test"):
        if name not in sizes and (args.out / f"{name}.parquet").exists():
            console.print(f"{args.out / name}.parquet is from an earlier run and may share puzzles with these files")


def _check(args: argparse.Namespace, mix: tuple[float, ...], sft_test: int) -> None:
    lowest = {"--train": (args.train, 1), "--test": (args.test, 1), "--sft": (args.sft, 0)}
    for option, (value, least) in {**lowest, "--sft-test": (sft_test, 1), "--seed": (args.seed, 0)}.items():
        if value < least:
            raise ValueError(f"{option} is {value}, but must be at least {least}")
    if len(set(args.numbers)) < len(args.numbers) or not set(args.numbers) <= set(COUNTS):
        values = ",".join(map(str, args.numbers))
        raise ValueError(f"--numbers is {values}, but must list different values of {', '.join(map(str, COUNTS))}")
    if len(mix) != len(args.numbers) or not all(0 < share < float("inf") for share in mix):
        shares = ",".join(f"{share:g}" for share in mix)
        raise ValueError(f"--mix is {shares}, but must hold a share above 0 for each of {len(args.numbers)} --numbers")
    if args.sft and args.sft_solution == "answer" and args.template == "base":
        raise ValueError("--sft-solution answer does not fit --template base, whose prompt opens <think>; use steps")


def prompt(puzzle: Puzzle, template: str) -> list[dict[str, str]]:
    """Return the prompt for a puzzle as chat messages. `template` is a key of `TEMPLATES`."""
    numbers = list(puzzle.numbers)
    text = TEMPLATES[template].format(numbers=numbers, spaced=" ".join(map(str, numbers)), target=puzzle.target)
    return [{"role": "user", "content": text}]


def rows(some: Iterable[Puzzle], split: str, template: str) -> Iterator[dict[str, Any]]:
    """Yield prompt rows in verl's format, one per puzzle."""
    for index, puzzle in enumerate(some):
        truth = {"target": puzzle.target, "numbers": list(puzzle.numbers)}
        yield {
            "data_source": "countdown",
            "prompt": prompt(puzzle, template),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": split, "index": index, "solution": puzzle.solution},
        }


def messages(puzzle: Puzzle, template: str, solution: str) -> list[dict[str, str]]:
    """Return a conversation with the prompt for the puzzle and its solution.

    `solution` is `steps` (`<think>` with the steps, and the answer) or `answer`.
    """
    content = f"<answer> {puzzle.solution} </answer>"
    if solution == "steps":
        content = f"<think> {puzzle.steps} </think>\n{content}"
    if template == "base":
        content = content.removeprefix("<think>")  # the prompt has opened it
    return [*prompt(puzzle, template), {"role": "assistant", "content": content}]
