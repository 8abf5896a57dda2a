r"""MATH prompts, from the data set's own files: a JSON file for each problem, in folders by split and subject.

The files of the hub are read too: `train.jsonl` and `test.jsonl`, or parquet. All have `problem` and `solution`, and
mostly `level` and `type`. The prompt is the problem with verl's instruction behind it, and the ground truth is what
the last box of the solution holds, as in verl's MATH files.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.prepare import jsonl, parquet
from pipeline.reward.rules.boxed import last_boxed

HELP = "competition problems whose answer is an expression in a box"

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
SPLITS = ("train", "test")
NAMES = {f"{split}{ending}": split for split in SPLITS for ending in (".jsonl", ".jsonl.gz", ".parquet")}
DATA_SOURCES = ("DigitalLearningGmbH/MATH-lighteval", "lighteval/MATH", "HuggingFaceH4/MATH-500")
KEYS = ("problem", "solution")

SCHEMA = parquet.prompt_schema(
    ground_truth=pa.string(),
    extra_info=[(name, pa.string()) for name in ("problem", "solution", "level", "type")],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m jobs.prepare math`."""
    add = parser.add_argument
    add("--input", type=Path, nargs="+", required=True, metavar="PATH", help="the folder that holds the folders train "
        "and test with their subjects, or the files train.jsonl, test.jsonl (.jsonl.gz, .parquet)")  # fmt: skip
    add("--out", type=Path, required=True, metavar="DIR", help="folder for train.parquet and test.parquet (replaced)")
    add("--data-source", choices=DATA_SOURCES, default=DATA_SOURCES[0], metavar="NAME",
        help=f"column data_source of the rows: {', '.join(DATA_SOURCES)} (default: %(default)s)")  # fmt: skip


def prepare(args: argparse.Namespace) -> None:
    """Writes one parquet file for each split there is.

    Raises:
        ValueError: the input is missing or not MATH's; files that were there before are untouched.
        OSError: the folder cannot be written; files that were there before are untouched.
    """
    places = find(args.input)
    counts = {}
    with parquet.together(args.out) as folder:
        for split, place in places.items():
            path = folder / f"{split}.parquet"
            parquet.write(path, SCHEMA, rows(place, split, args.data_source))
            counts[split] = pq.read_metadata(path).num_rows
            if not counts[split]:
                raise ValueError(f"{place} holds no problems")
    for split, count in counts.items():
        print(f"{args.out / split}.parquet: {count:,} problems")


def find(inputs: list[Path]) -> dict[str, Path]:
    """The file, or folder of subjects, of each split.

    Raises:
        ValueError: a path does not exist or is named otherwise, a folder holds neither, or a split has two.
    """
    folders: dict[str, Path] = {}
    others: list[Path] = []
    for given in inputs:
        inside = [given / split for split in SPLITS if (given / split).is_dir()]
        inside += [given] if given.is_dir() and given.name in SPLITS and not inside else []
        for folder in inside:
            if folder.name in folders:
                raise ValueError(f"--input has two folders for {folder.name}: {folders[folder.name]} and {folder}")
            folders[folder.name] = folder
        if not inside:
            if given.is_dir() and not any((given / name).is_file() for name in NAMES):
                raise ValueError(f"--input {given} holds no folder train or test and none of {', '.join(NAMES)}")
            others.append(given)
    files = jsonl.find(others, NAMES)
    both = sorted(set(folders) & set(files))
    if both:
        raise ValueError(f"--input has two sources for {both[0]}: {folders[both[0]]} and {files[both[0]]}")
    return folders | files


def rows(place: Path, split: str, data_source: str) -> Iterator[dict[str, Any]]:
    """Rows in verl's format, one for each problem.

    Raises:
        ValueError: a file cannot be read, or holds no problem; the sentence names the file and the line or row.
    """
    for index, (where, problem) in enumerate(problems(place)):
        answer = last_boxed(problem["solution"])
        if not answer:
            raise ValueError(f"{where}: 'solution' has no \\boxed{{...}} with an answer in it")
        level = problem.get("level")
        extra = {
            "split": split,
            "index": index,
            "problem": problem["problem"],
            "solution": problem["solution"],
            "level": f"Level {level}" if isinstance(level, int) else _optional(level),
            "type": _optional(problem.get("type", problem.get("subject"))),
        }
        yield {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": f"{problem['problem']} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": extra,
        }


def problems(place: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The problems of a folder of subjects or of one file, with the words that name their place."""
    if place.is_dir():
        for file in sorted(place.rglob("*.json"), key=lambda file: (file.parent, _number(file), file.name)):
            yield str(file), _problem(file)
    elif place.suffix == ".parquet":
        yield from _parquet(place)
    else:
        yield from jsonl.objects(place, KEYS)


def _number(file: Path) -> int:
    return int(file.stem) if file.stem.isascii() and file.stem.isdigit() else -1


def _problem(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}, line {error.lineno}: not JSON ({error.msg})") from error
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{file}: not JSON ({error})") from error
    jsonl.check(found, KEYS, str(file))
    return found


def _parquet(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    try:
        with pq.ParquetFile(file) as source:
            for batch in source.iter_batches(batch_size=parquet.ROW_GROUP):
                for found in batch.to_pylist():
                    number += 1
                    jsonl.check(found, KEYS, f"{file}, row {number}")
                    yield f"{file}, row {number}", found
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file} cannot be read after row {number}: {error}") from error


def _optional(value: Any) -> str:
    return value if isinstance(value, str) else ""
