"""Sums of two numbers, for chat models that answer some of them: `What is 17 + 25? Answer with the number only.`

No pair of numbers occurs twice, also not with the numbers exchanged. So test prompts differ from training prompts.
`test.parquet` does not depend on `--train`.
"""

import argparse
import random
from collections.abc import Iterator
from itertools import combinations_with_replacement
from typing import Any

import pyarrow as pa

from jobs.prepare import parquet
from pipeline.config.paths import local_path

help = "sums of two numbers, for small chat models"

QUESTION = "What is {} + {}? Answer with the number only."
SCHEMA = parquet.prompt_schema([("ground_truth", pa.string())], [])
OPTIONS = (
    ("train", 2000, "training prompts", 1),
    ("test", 200, "test prompts", 1),
    ("smallest", 10, "smallest number", 0),
    ("largest", 99, "largest number", 0),
    ("seed", 0, "the same options and seed give the same rows", 0),
)
"""(Name, default, help, minimum) of each option that is a number."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m jobs.prepare sums`."""
    text = "folder for train.parquet and test.parquet (replaced)"
    parser.add_argument("--out", type=local_path, required=True, metavar="DIR", help=text)
    for name, default, text, _ in OPTIONS:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")


def prepare(args: argparse.Namespace) -> None:
    """Write the files. After an error, older files are unchanged."""
    for name, _, _, least in OPTIONS:
        if getattr(args, name) < least:
            raise ValueError(f"--{name} is {getattr(args, name)}, but must be at least {least}")
    numbers = range(args.smallest, args.largest + 1)
    pairs = list(combinations_with_replacement(numbers, 2))
    if args.test + args.train > len(pairs):
        raise ValueError(
            f"--test and --train need {args.test + args.train:,} pairs, but the {len(numbers)} numbers from --smallest "
            f"to --largest give {len(pairs):,}; ask for fewer, or raise --largest"
        )
    draw = random.Random(f"sums {args.seed}")
    draw.shuffle(pairs)
    sizes = {"test": (0, args.test), "train": (args.test, args.test + args.train)}
    with parquet.together(args.out) as folder:
        for split, (first, end) in sizes.items():
            parquet.write(folder / f"{split}.parquet", SCHEMA, _rows(pairs[first:end], split, draw))
    for split, (first, end) in sizes.items():
        print(f"{args.out / split}.parquet: {end - first:,} sums")


def _rows(pairs: list[tuple[int, int]], split: str, draw: random.Random) -> Iterator[dict[str, Any]]:
    for index, pair in enumerate(pairs):
        one, other = draw.sample(pair, 2)
        yield {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": QUESTION.format(one, other)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(one + other)},
            "extra_info": {"split": split, "index": index},
        }
