"""GSM8K prompts, from the data set's own files: `train.jsonl` and `test.jsonl` with `question` and `answer`.

The prompt is the question with verl's instruction behind it, and the columns are those of verl's GSM8K files, so either
program reads the other's. The ground truth is the number after `####` of the answer, without commas.
"""

import argparse
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.prepare import parquet
from pipeline.reward.rules.gsm8k import canonical, strict_answer

HELP = "grade-school word problems whose answer is a number"

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SPLITS = ("train", "test")
ENDINGS = (".jsonl", ".jsonl.gz")

SCHEMA = parquet.prompt_schema(
    ground_truth=pa.string(), extra_info=[("question", pa.string()), ("answer", pa.string())]
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m jobs.prepare gsm8k`."""
    add = parser.add_argument
    add("--input", type=Path, nargs="+", required=True, metavar="PATH", help="the data set's files, train.jsonl and "
        "test.jsonl (or .jsonl.gz), or the folder that holds them")  # fmt: skip
    add("--out", type=Path, required=True, metavar="DIR", help="folder for train.parquet and test.parquet (replaced)")


def prepare(args: argparse.Namespace) -> None:
    """Writes one parquet file for each split there is.

    Raises:
        ValueError: the input is missing or not GSM8K's; files that were there before are untouched.
        OSError: the folder cannot be written; files that were there before are untouched.
    """
    files = find(args.input)
    counts = {}
    with parquet.together(args.out) as folder:
        for split, file in files.items():
            path = folder / f"{split}.parquet"
            parquet.write(path, SCHEMA, rows(file, split))
            counts[split] = pq.read_metadata(path).num_rows
            if not counts[split]:
                raise ValueError(f"{file} holds no problems")
    for split, count in counts.items():
        print(f"{args.out / split}.parquet: {count:,} problems")


def find(inputs: list[Path]) -> dict[str, Path]:
    """The file of each split, by name.

    Raises:
        ValueError: a path does not exist or is named otherwise, a folder holds no such file, or a split has two.
    """
    names = {f"{split}{ending}": split for split in SPLITS for ending in ENDINGS}
    found: dict[str, Path] = {}
    for given in inputs:
        files = [given / name for name in names if (given / name).is_file()] if given.is_dir() else [given]
        if not files:
            raise ValueError(f"--input {given} holds none of {', '.join(names)}")
        for file in files:
            if file.name not in names:
                raise ValueError(f"--input {file} must be named one of {', '.join(names)}, which tells its split")
            if not file.is_file():
                raise ValueError(f"--input {file} does not exist")
            split = names[file.name]
            if split in found:
                raise ValueError(f"--input has two files for {split}: {found[split]} and {file}; name one of them")
            found[split] = file
    return found


def rows(file: Path, split: str) -> Iterator[dict[str, Any]]:
    """Rows in verl's format, one for each line that is not blank.

    Raises:
        ValueError: the file cannot be read, or a line is not a problem; the sentence names file and line.
    """
    for index, (number, line) in enumerate(lines(file)):
        question, answer = _problem(line, f"{file}, line {number}")
        found = strict_answer(answer)
        truth = None if found is None else canonical(*found)
        if truth is None:
            raise ValueError(f"{file}, line {number}: 'answer' has no number after ####")
        yield {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
        }


def lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1."""
    number = 0
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb") as stream:
            for number, raw in enumerate(stream, start=1):
                line = raw.decode()
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}, line {number}: not UTF-8 text ({error})") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be read after line {number}: {error}") from error


def _problem(line: str, where: str) -> tuple[str, str]:
    try:
        problem = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(problem, dict):
        raise ValueError(f"{where}: must be an object with 'question' and 'answer', not a {type(problem).__name__}")
    for key in ("question", "answer"):
        text = problem.get(key)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{where}: {key!r} must be text, not {str(text)[:80]!r}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: {key!r} cannot be written as UTF-8 ({error.reason})") from error
    return problem["question"], problem["answer"]
