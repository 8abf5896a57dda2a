"""HellaSwag prompts, from the data set's own files: `hellaswag_train.jsonl` and `hellaswag_val.jsonl`.

Templates:
- `letters` is the beginning of the story as in verl's files, the endings with letters, and the question which of them
  fits. The rule of `Rowan/hellaswag` scores the letter.
- `verl` is the beginning alone, for models that are judged by the likelihood of each ending, as verl's files are meant:
  there is no letter to choose, so the rule finds no answer, and `reward_model.choices` holds the endings.

The ground truth is the place of the right ending, from 0.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.prepare import jsonl, parquet
from pipeline.reward.rules.multiple_choice import LETTERS

HELP = "stories to which one of four endings fits"

TEMPLATES = ("letters", "verl")
QUESTION = "Which ending fits best? Answer with its letter."
SPLITS = {"train": "train", "val": "validation"}
NAMES = {f"hellaswag_{name}{ending}": split for name, split in SPLITS.items() for ending in (".jsonl", ".jsonl.gz")}
KEYS = ("activity_label", "ctx_a", "ctx_b")

SCHEMA = pa.schema(
    [
        field.with_type(
            pa.struct(
                [
                    ("style", pa.string()),
                    ("eval", pa.string()),
                    ("ground_truth", pa.int64()),
                    ("choices", pa.list_(pa.string())),
                ]
            )
        )
        if field.name == "reward_model"
        else field
        for field in parquet.prompt_schema(ground_truth=pa.int64(), extra_info=[])
    ]
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m jobs.prepare hellaswag`."""
    add = parser.add_argument
    add("--input", type=Path, nargs="+", required=True, metavar="PATH", help="the data set's files, "
        "hellaswag_train.jsonl and hellaswag_val.jsonl (or .jsonl.gz), or the folder that holds them")  # fmt: skip
    add("--out", type=Path, required=True, metavar="DIR", help="folder for train.parquet and validation.parquet "
        "(replaced)")  # fmt: skip
    add("--template", choices=TEMPLATES, default=TEMPLATES[0], help="letters: the story and its endings with letters; "
        "verl: the story alone (default: %(default)s)")  # fmt: skip


def prepare(args: argparse.Namespace) -> None:
    """Writes one parquet file for each split there is.

    Raises:
        ValueError: the input is missing or not HellaSwag's; files that were there before are untouched.
        OSError: the folder cannot be written; files that were there before are untouched.
    """
    files = jsonl.find(args.input, NAMES)
    counts = {}
    with parquet.together(args.out) as folder:
        for split, file in files.items():
            path = folder / f"{split}.parquet"
            parquet.write(path, SCHEMA, rows(file, split, args.template))
            counts[split] = pq.read_metadata(path).num_rows
            if not counts[split]:
                raise ValueError(f"{file} holds no stories")
    for split, count in counts.items():
        print(f"{args.out / split}.parquet: {count:,} stories")


def rows(file: Path, split: str, template: str) -> Iterator[dict[str, Any]]:
    """Rows in verl's format, one for each line that is not blank.

    Raises:
        ValueError: the file cannot be read, or a line is not a story; the sentence names file and line.
    """
    for index, (where, story) in enumerate(jsonl.objects(file, KEYS, may_be_empty=KEYS)):
        endings = story.get("endings")
        if not isinstance(endings, list) or not 2 <= len(endings) <= len(LETTERS):
            raise ValueError(f"{where}: 'endings' must be a list of endings, not {str(endings)[:80]!r}")
        choices = [tidy(jsonl.text(one, f"ending {place}", where)) for place, one in enumerate(endings)]
        label = _label(story.get("label"), len(choices), where)
        content = tidy(f"{story['activity_label']}: {story['ctx_a']} {story['ctx_b'].capitalize()}")
        if template == "letters":
            lettered = [f"{letter}. {choice.strip()}" for letter, choice in zip(LETTERS, choices, strict=False)]
            content = "\n".join([content, *lettered, QUESTION])
        yield {
            "data_source": "Rowan/hellaswag",
            "prompt": [{"role": "user", "content": content}],
            "ability": "nlp",
            "reward_model": {
                "style": "rule" if template == "letters" else "model",
                "eval": "multiple_choice",
                "ground_truth": label,
                "choices": choices,
            },
            "extra_info": {"split": split, "index": index},
        }


def tidy(story: str) -> str:
    """A text without the marks in square brackets that WikiHow's part of the data set has."""
    text = re.sub(r"\[[^\]\n]{0,200}\]", "", story.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _label(label: Any, count: int, where: str) -> int:
    place = int(label) if isinstance(label, str) and label.isascii() and label.isdigit() and len(label) < 3 else label
    if type(place) is not int or not 0 <= place < count:
        raise ValueError(
            f"{where}: 'label' must be the place of the right ending, from 0 to {count - 1}, not {str(label)[:80]!r} "
            "(the test file has no labels)"
        )
    return place
