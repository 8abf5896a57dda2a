"""GSM8K prompts, from the data set's own files: `train.jsonl` and `test.jsonl` with `question` and `answer`.

The prompt is the question with verl's instruction behind it, and the columns are those of verl's GSM8K files, so either
program reads the other's. The ground truth is the number after `####` of the answer, without commas.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.prepare import jsonl, parquet
from pipeline.reward.rules.gsm8k import canonical, strict_answer

HELP = "grade-school word problems whose answer is a number"

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SPLITS = ("train", "test")
NAMES = {f"{split}{ending}": split for split in SPLITS for ending in (".jsonl", ".jsonl.gz")}

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
    files = jsonl.find(args.input, NAMES)
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


def rows(file: Path, split: str) -> Iterator[dict[str, Any]]:
    """Rows in verl's format, one for each line that is not blank.

    Raises:
        ValueError: the file cannot be read, or a line is not a problem; the sentence names file and line.
    """
    for index, (where, problem) in enumerate(jsonl.objects(file, ("question", "answer"))):
        question, answer = problem["question"], problem["answer"]
        found = strict_answer(answer)
        truth = None if found is None else canonical(*found)
        if truth is None:
            raise ValueError(f"{where}: 'answer' has no number after ####")
        yield {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
        }
