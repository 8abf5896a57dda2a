r"""Geometry3K prompts, from rows with `problem`, `answer` and `images`.

The prompt is the problem, in which `<image>` stands for each image, followed by verl's instruction to think in
`<think>` and to answer in `\boxed{}`. The columns equal verl's files. The ground truth is the answer.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from jobs.prepare import parquet
from jobs.prepare.hub import HubData, Placed
from pipeline.conversations import IMAGE

INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. "
    "The final answer MUST BE put in \\boxed{}."
)
EXTRA = [("question", pa.string()), ("answer", pa.string())]
SCHEMA = parquet.prompt_schema([("ground_truth", pa.string())], EXTRA).append(parquet.IMAGES)


def rows(problems: Placed, split: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield prompt rows in verl's format. Errors name file and line of the input row."""
    for index, (where, problem) in enumerate(problems):
        question, answer, images = problem["problem"], problem["answer"], problem.get("images")
        encoded = isinstance(images, list) and all(
            isinstance(image, dict) and isinstance(image.get("bytes"), bytes) for image in images
        )
        if not images or not encoded:
            raise ValueError(f"{where}: 'images' must be a list of images with their bytes, not {str(images)[:80]!r}")
        if question.count(IMAGE) != len(images):
            raise ValueError(
                f"{where}: {IMAGE} stands {question.count(IMAGE)} times in 'problem', which has {len(images)} images"
            )
        yield {
            "data_source": "hiyouga/geometry3k",
            "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
            "images": [{"bytes": image["bytes"], "path": image.get("path")} for image in images],
        }


DATA = HubData(
    help="geometry problems with a drawing, whose answer is in a box",
    origin="hiyouga/geometry3k",
    keys=("problem", "answer"),
    outputs={"": (SCHEMA, rows)},
    splits=(("train", "train"), ("validation", "validation"), ("test", "test")),
)
