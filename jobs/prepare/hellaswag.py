"""HellaSwag prompts: the beginning of a story and its endings. The ground truth is the right ending's index, from 0.

Templates:
- `letters` is the beginning of the story as in verl's files, the endings with letters, and the question which one fits.
  The rule of `Rowan/hellaswag` scores the letter.
- `verl` is only the beginning, as in verl's files, for evaluation by the likelihood of each ending. There are no
  letters to choose from, so the rule finds nothing; `reward_model.choices` holds the endings.
"""

import argparse
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from jobs.prepare import parquet
from jobs.prepare.hub import HubData, Placed, check_text
from pipeline.reward.rules.multiple_choice import LETTERS

QUESTION = "Which ending fits best? Answer with its letter."
TRUTH = [("eval", pa.string()), ("ground_truth", pa.int64()), ("choices", pa.list_(pa.string()))]
SCHEMA = parquet.prompt_schema(TRUTH, [])


def rows(stories: Placed, split: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield prompt rows in verl's format. Errors name file and line of the input row."""
    letters = args.template == "letters"
    for index, (where, story) in enumerate(stories):
        endings = story.get("endings")
        if not isinstance(endings, list) or not 2 <= len(endings) <= len(LETTERS):
            raise ValueError(f"{where}: 'endings' must be a list of endings, not {str(endings)[:80]!r}")
        choices = [tidy(check_text(ending, f"ending {place}", where)) for place, ending in enumerate(endings)]
        label = _label(story.get("label"), len(choices), where)
        content = tidy(f"{story['activity_label']}: {story['ctx_a']} {story['ctx_b'].capitalize()}")
        if letters:
            lettered = [f"{letter}. {choice.strip()}" for letter, choice in zip(LETTERS, choices, strict=False)]
            content = "\n".join([content, *lettered, QUESTION])
        yield {
            "data_source": "Rowan/hellaswag",
            "prompt": [{"role": "user", "content": content}],
            "ability": "nlp",
            "reward_model": {
                "style": "rule" if letters else "model",
                "eval": "multiple_choice",
                "ground_truth": label,
                "choices": choices,
            },
            "extra_info": {"split": split, "index": index},
        }


def tidy(story: str) -> str:
    """Remove marks in square brackets, such as `[title]`, which rows from WikiHow have."""
    plain = re.sub(r"\[[^\]\n]{0,200}\]", "", story.strip().replace(" [title]", ". "))
    return plain.replace("  ", " ")


def _label(label: Any, count: int, where: str) -> int:
    place = int(label) if isinstance(label, str) and label.isascii() and label.isdigit() and len(label) < 3 else label
    if type(place) is not int or not 0 <= place < count:
        raise ValueError(
            f"{where}: 'label' must be the index of the right ending, from 0 to {count - 1}, not {str(label)[:80]!r} "
            "(the test file has no labels)"
        )
    return place


DATA = HubData(
    help="stories to which one of four endings fits",
    origin="Rowan/hellaswag",
    keys=("activity_label", "ctx_a", "ctx_b"),
    outputs={"": (SCHEMA, rows)},
    noun="stories",
    splits=(("train", "train"), ("val", "validation"), ("validation", "validation")),
    blanks=True,
    option=(
        "--template",
        ("letters", "verl"),
        "letters: the story with its endings; verl: the story only",
    ),
)
