"""Texts to write backwards, as in prime-rl's example `reverse_text`: prompts, and answers for a warm start.

The system message is the one in verifiers' environment `reverse-text`, whose texts are on the Hub. Here a text is drawn
from `WORDS`, so that a small model can learn the task within minutes. Each text occurs once in all files.
"""

import argparse
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow as pa

from jobs.prepare import parquet
from jobs.prepare.agent_task import assistant, check, user
from pipeline.config.paths import local_path
from pipeline.reward.rules.reverse_text import CLOSE, OPEN

help = "short texts to write backwards, and answers for a warm start"

SYSTEM = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
TEXT = (
    "above apple baker beach berry black bread brick bring brown build cabin candle carry castle chair chalk cheese "
    "cherry child church circle clean clock cloud coast copper corner cotton cream dance desert doctor dragon dream "
    "drink early earth engine evening family farmer field finger flower forest friend garden ginger glass grain green "
    "guitar hammer happy harbor heart honey horse house island jacket kitchen ladder lemon letter light little market "
    "meadow middle mirror money morning mother mountain music narrow needle night north ocean onion orange paper "
    "pencil people pepper picture planet pocket potato quick quiet rabbit river rocket salmon school season shadow "
    "silver simple sister small smile spring square stone storm story street summer sunday table tailor teacher "
    "ticket tiger travel uncle valley village violin wagon water weather wheel white window winter wonder yellow"
)
WORDS = TEXT.split()
SCHEMA = parquet.prompt_schema([("ground_truth", pa.string())], [])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m jobs.prepare reverse_text`."""
    text = "folder for train.parquet, test.parquet, sft_train.parquet and sft_test.parquet (replaced)"
    parser.add_argument("--out", type=local_path, required=True, metavar="DIR", help=text)
    for name, default, text in (
        ("--train", 4_000, "training texts"),
        ("--test", 200, "test texts"),
        ("--sft", 1_600, "answered texts in sft_train.parquet; sft_test.parquet has a twentieth of them"),
        ("--words", 2, "largest number of words of a text"),
        ("--seed", 0, "the same options and seed give the same rows"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{text} (default: %(default)s)")


def prepare(args: argparse.Namespace) -> None:
    """Write the files. After an error, older files are unchanged."""
    check(args, test=1, words=1)
    sizes = {"test": args.test, "train": args.train, "sft_test": args.sft // 20, "sft_train": args.sft}
    known, needed = sum(len(WORDS) ** count for count in range(1, args.words + 1)), sum(sizes.values())
    # Most texts of the largest number of words are free, so that drawing them ends soon.
    if needed > known // 2:
        raise ValueError(
            f"--test, --train and --sft need {needed:,} texts, but at most {known // 2:,} are drawn from {len(WORDS)} "
            f"words with --words {args.words}; ask for fewer texts or more words"
        )
    texts = _texts(random.Random(f"reverse_text {args.seed}"), args.words, needed)
    with parquet.together(args.out) as folder:
        for name, size in sizes.items():
            path, some = folder / f"{name}.parquet", islice(texts, size)
            if name.startswith("sft"):
                parquet.write(path, parquet.SFT, ({"messages": [*prompt(text), answer(text)]} for text in some))
            else:
                parquet.write(path, SCHEMA, (_row(name, index, text) for index, text in enumerate(some)))
    for name, size in sizes.items():
        print(f"{args.out / name}.parquet: {size:,} texts")


def _texts(draw: random.Random, words: int, needed: int) -> Iterator[str]:
    """Yield `needed` different texts of 1 to `words` words."""
    seen: set[str] = set()
    while len(seen) < needed:
        text = " ".join(draw.choices(WORDS, k=draw.randint(1, words)))
        if text not in seen:
            seen.add(text)
            yield text


def prompt(text: str) -> list[dict[str, Any]]:
    """Return the prompt for a text as chat messages."""
    return [{"role": "system", "content": SYSTEM}, user(text)]


def answer(text: str) -> dict[str, Any]:
    """Return the right answer as a chat message."""
    return assistant(f"{OPEN}{text[::-1]}{CLOSE}")


def _row(split: str, index: int, text: str) -> dict[str, Any]:
    return {
        "data_source": "reverse_text",
        "prompt": prompt(text),
        "ability": "text",
        "reward_model": {"style": "rule", "ground_truth": text[::-1]},
        "extra_info": {"split": split, "index": index},
    }
