"""Make preference pairs from the scored responses of a run or an evaluation, or from parquet files in this format.

The responses to a prompt are ranked by their scores. The best and the worst one become a pair if their scores differ;
with `--per-prompt` also the second best and the second worst, and so on. Responses without text or with an error of the
reward are left out, and so are pairs with equal texts. If a run visits a prompt twice, each visit has its own group of
responses.

- `train.parquet`: `prompt`, `chosen` and `rejected` as chat messages, for `python -m jobs.dpo` and `jobs.reward_model`;
  `margin`, the difference of the scores; and `data_source`.
- `test.parquet`: the pairs of the prompts held out by `--test-share`, chosen by a hash of the prompt.
"""

import argparse
import hashlib
import itertools
import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.prepare import parquet
from jobs.prepare.hh_rlhf import PAIRS
from pipeline.config.paths import local_path
from pipeline.conversations import answered

help = "preference pairs from the scored answers of a run or an evaluation, for jobs.dpo and jobs.reward_model"
SCHEMA = pa.schema([*PAIRS, ("margin", pa.float64()), ("data_source", pa.string())])
COLUMNS = ("uid", "data_source", "prompt", "response", "score", "reward_error")
FOLDERS = ("trajectories", "responses")
"""Names of the folders that hold the responses of a run and of an evaluation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--from`, `--out`, `--per-prompt`, `--min-gap` and `--test-share`."""
    add = parser.add_argument
    text = "folders of runs (runs/NAME) or evaluations (--out of jobs.evaluate), folders in them, or parquet files"
    add("--from", dest="inputs", type=local_path, nargs="+", required=True, metavar="PATH", help=text)
    add("--out", type=local_path, required=True, metavar="DIR", help="folder of the parquet files (replaced)")
    add("--per-prompt", type=int, default=1, metavar="N", help="most pairs of one group of answers (default: 1)")
    text = "least difference of the scores of a pair (default: any)"
    add("--min-gap", type=float, default=0.0, metavar="GAP", help=text)
    text = "share of the prompts whose pairs go to test.parquet (default: 0)"
    add("--test-share", type=float, default=0.0, metavar="SHARE", help=text)


def prepare(args: argparse.Namespace) -> None:
    """Write the files with pairs. After an error, older files are unchanged.

    Raises:
        ValueError: an option is out of range, an input cannot be read, or no group gives a pair.
    """
    if args.per_prompt < 1:
        raise ValueError(f"--per-prompt {args.per_prompt} must be at least 1")
    if not args.min_gap >= 0:
        raise ValueError(f"--min-gap {args.min_gap:g} must be at least 0")
    if not 0 <= args.test_share < 1:
        raise ValueError(f"--test-share {args.test_share:g} must be at least 0 and below 1")
    files = list(_files(args.inputs))
    splits = ["train", "test"] if args.test_share else ["train"]
    with parquet.together(args.out) as folder:
        for split in splits:
            # `_rows` gives None for a group without a pair, and `write` counts it.
            kept, without = parquet.write(folder / f"{split}.parquet", SCHEMA, _rows(files, split, args))
            if not kept:
                gap = f" by at least --min-gap {args.min_gap:g}" if args.min_gap else ""
                raise ValueError(
                    f"{args.inputs[0]}: none of {without:,} groups of answers gives a pair for {split}.parquet: a pair "
                    f"needs two answers to one prompt whose scores differ{gap} (rollout.n or rollout.val_kwargs.n "
                    "above 1, a temperature above 0)"
                )
            print(f"{args.out / split}.parquet: {kept:,} pairs; {without:,} groups of answers gave none")


def _rows(files: list[Path], split: str, args: argparse.Namespace) -> Iterator[dict[str, Any] | None]:
    """Yield the pairs of one split, and None for each group of responses without a pair."""
    for group in itertools.chain.from_iterable(map(_groups, files)):
        if _held_out(group[0]["prompt"], args.test_share) == (split == "test"):
            pairs = list(_pairs(group, args.per_prompt, args.min_gap))
            yield from pairs or (None,)


def _files(inputs: list[Path]) -> Iterator[Path]:
    for path in inputs:
        if path.is_file():
            yield path
            continue
        if not path.is_dir():
            raise ValueError(f"{path}: no such file or folder")
        folder = next((path / name for name in FOLDERS if (path / name).is_dir()), path)
        found = sorted(folder.rglob("*.parquet"))
        if not found:
            raise ValueError(
                f"{path} holds no parquet file; give the folder of a run that has trained, or of an evaluation"
            )
        yield from found


def _groups(file: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each group of responses in a file, which holds whole groups."""
    try:
        names = pq.read_schema(file).names
        missing = [name for name in COLUMNS if name not in names and name != "reward_error"]
        if missing:
            raise ValueError(
                f"{file} has no column {missing[0]!r}, but {', '.join(names)}; give rows of a run or an evaluation"
            )
        table = pq.ParquetFile(file).read([name for name in (*COLUMNS, "messages") if name in names])
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file} cannot be read as parquet: {error}") from error
    if "messages" in table.column_names and table["messages"].null_count < len(table):
        raise ValueError(
            f"{file} has episodes of several turns, whose answers follow different messages; pairs need single answers"
        )
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        groups.setdefault(row["uid"], []).append(row)
    yield from groups.values()


def _held_out(prompt: str, share: float) -> bool:
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _pairs(group: list[dict[str, Any]], most: int, least_gap: float) -> Iterator[dict[str, Any]]:
    scored = [row for row in group if row["response"] and row["score"] is not None and not row.get("reward_error")]
    ranked = sorted(scored, key=operator.itemgetter("score"))
    for worse, better in itertools.islice(zip(ranked, reversed(ranked), strict=True), most):
        gap = better["score"] - worse["score"]
        if gap <= 0 or gap < least_gap:
            return
        if better["response"] != worse["response"]:
            *prompt, chosen = answered(json.loads(better["prompt"]), better["response"])
            yield {
                "prompt": prompt,
                "chosen": [chosen],
                "rejected": [{**chosen, "content": worse["response"]}],
                "margin": gap,
                "data_source": better["data_source"],
            }
