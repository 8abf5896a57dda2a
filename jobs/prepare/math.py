r"""MATH prompts, from rows with `problem` and `solution`, and mostly `level` and `type` (or `subject`).

The input is the files on the hub, or one JSON file per problem in folders by split and subject. The prompt is the
problem, followed by verl's instruction. The ground truth is the content of the last `\boxed{...}` in the solution, as
in verl's files.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from jobs.prepare import parquet
from jobs.prepare.hub import HubData, Placed
from pipeline.reward.rules.boxed import last_boxed

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
DATA_SOURCES = ("DigitalLearningGmbH/MATH-lighteval", "lighteval/MATH", "HuggingFaceH4/MATH-500")
EXTRA = [(name, pa.string()) for name in ("problem", "solution", "level", "type")]
SCHEMA = parquet.prompt_schema([("ground_truth", pa.string())], EXTRA)


def rows(problems: Placed, split: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield prompt rows in verl's format. Errors name file and line of the input row."""
    for index, (where, problem) in enumerate(problems):
        answer = last_boxed(problem["solution"])
        if not answer:
            raise ValueError(f"{where}: 'solution' has no \\boxed{{...}} with an answer in it")
        level, kind = problem.get("level"), problem.get("type", problem.get("subject"))
        yield {
            "data_source": args.data_source,
            "prompt": [{"role": "user", "content": f"{problem['problem']} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {
                "split": split,
                "index": index,
                "problem": problem["problem"],
                "solution": problem["solution"],
                "level": f"Level {level}" if isinstance(level, int) else _text_or_blank(level),
                "type": _text_or_blank(kind),
            },
        }


def _text_or_blank(value: Any) -> str:
    return value if isinstance(value, str) else ""


DATA = HubData(
    help="competition problems whose answer is an expression in a box",
    origin=DATA_SOURCES[0],
    keys=("problem", "solution"),
    outputs={"": (SCHEMA, rows)},
    many_folders=True,
    option=("--data-source", DATA_SOURCES, "column data_source of the rows"),
)
