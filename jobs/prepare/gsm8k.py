"""GSM8K prompts, from rows with `question` and `answer`.

The prompt is the question, followed by verl's instruction. The columns equal verl's GSM8K files, so verl and this
program read each other's files. The ground truth is the number after `####` of the answer, without commas.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from jobs.prepare import parquet
from jobs.prepare.hub import HubData, Placed
from pipeline.reward.rules.gsm8k import canonical, strict_answer

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SCHEMA = parquet.prompt_schema([("ground_truth", pa.string())], [("question", pa.string()), ("answer", pa.string())])


def rows(problems: Placed, split: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield prompt rows in verl's format. Errors name file and line of the input row."""
    for index, (where, problem) in enumerate(problems):
        question, answer = problem["question"], problem["answer"]
        number = strict_answer(answer)
        truth = None if number is None else canonical(*number)
        if truth is None:
            raise ValueError(f"{where}: 'answer' has no number after ####")
        yield {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
        }


DATA = HubData(
    help="grade-school word problems whose answer is a number",
    origin="openai/gsm8k --include 'main/*'",
    keys=("question", "answer"),
    outputs={"": (SCHEMA, rows)},
)
