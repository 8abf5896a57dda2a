"""Pictures of coloured blocks, with questions: how many blocks there are, or their colour.

A picture of 56 x 56 pixels has 1 to 4 blocks of one of 4 colours. Numbers and colours are uniform and independent, so
without the picture one of 4 answers is right. Answers of the warm start have the right form, and most are drawn at
random: it teaches the form, and reinforcement learning the rest. With `--blank` all pictures are empty.
"""

import argparse
import io
import random
from typing import Any, NamedTuple

import pyarrow as pa

from jobs.prepare import parquet
from pipeline.config.paths import local_path

help = "questions on pictures of coloured blocks, for tiny vision-language models"

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 50)}
BACKGROUND = (245, 245, 245)
SIDE, CELL = 56, 28
"""Side of a picture and of one of its 4 cells, in pixels. A cell has one block or none."""
COUNT, COLOUR = "How many blocks are there?", "What colour is the shape?"
ANSWERS = {COUNT: ["1", "2", "3", "4"], COLOUR: list(COLOURS)}
PROMPTS = parquet.prompt_schema([("ground_truth", pa.string())], []).append(parquet.IMAGES)
SFT = parquet.SFT.append(parquet.IMAGES)
OPTIONS = (
    ("train", 4000, "training prompts", 1),
    ("test", 400, "test prompts", 1),
    ("sft", 6400, "conversations of the warm start", 1),
    ("sft-test", 200, "conversations to validate the warm start", 1),
    ("seed", 0, "the same options and seed give the same rows", 0),
)
"""(Name, default, help, minimum) of each option that is a number."""


class Example(NamedTuple):
    """A question on a picture, with its right answer."""

    picture: bytes
    """The picture as PNG."""
    question: str
    answer: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m jobs.prepare blocks`."""
    text = "folder for train.parquet, test.parquet, sft_train.parquet and sft_test.parquet (replaced)"
    parser.add_argument("--out", type=local_path, required=True, metavar="DIR", help=text)
    for name, default, text, _ in OPTIONS:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    text = "share of right answers in the warm start; the others are drawn at random (default: %(default)s)"
    parser.add_argument("--sft-right", type=float, default=0.25, help=text)
    parser.add_argument("--blank", action="store_true", help="empty pictures, to see what answers without them reach")


def prepare(args: argparse.Namespace) -> None:
    """Write the files. After an error, older files are unchanged."""
    for name, _, _, least in OPTIONS:
        if (value := getattr(args, name.replace("-", "_"))) < least:
            raise ValueError(f"--{name} is {value}, but must be at least {least}")
    if not 0 <= args.sft_right <= 1:
        raise ValueError(f"--sft-right is {args.sft_right:g}, but must be between 0 and 1")
    sizes = {"train": args.train, "test": args.test, "sft_train": args.sft, "sft_test": args.sft_test}
    with parquet.together(args.out) as folder:
        for split, size in sizes.items():
            # Each file has its own numbers, so that its rows do not depend on the sizes of the others.
            draw = random.Random(f"blocks {split} {args.seed}")
            examples = (example(draw, args.blank) for _ in range(size))
            if split.startswith("sft"):
                right = args.sft_right if split == "sft_train" else 1.0
                rows, schema = (_conversation(one, draw, right) for one in examples), SFT
            else:
                rows, schema = (_prompt(one, split, index) for index, one in enumerate(examples)), PROMPTS
            parquet.write(folder / f"{split}.parquet", schema, rows)
    for split, size in sizes.items():
        print(f"{args.out / split}.parquet: {size:,} pictures")


def example(draw: random.Random, blank: bool = False) -> Example:
    """Draw a picture with a question. With `blank` the picture is empty, and the answer as if it were not."""
    from PIL import Image, ImageDraw

    number, colour = draw.randint(1, 4), draw.choice(list(COLOURS))
    image = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
    canvas = ImageDraw.Draw(image)
    for cell in draw.sample(range(4), number):
        left, top = CELL * (cell % 2) + draw.randint(2, 7), CELL * (cell // 2) + draw.randint(2, 7)
        size = draw.randint(12, 18)
        if not blank:
            canvas.rectangle((left, top, left + size, top + size), fill=COLOURS[colour])
    file = io.BytesIO()
    image.save(file, "PNG")
    question = draw.choice([COUNT, COLOUR])
    return Example(file.getvalue(), question, str(number) if question == COUNT else colour)


def _user(question: str) -> dict[str, str]:
    return {"role": "user", "content": f"<image>{question}"}


def _images(one: Example) -> list[dict[str, Any]]:
    return [{"bytes": one.picture, "path": None}]


def _prompt(one: Example, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": "blocks",
        "prompt": [_user(one.question)],
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": one.answer},
        "extra_info": {"split": split, "index": index},
        "images": _images(one),
    }


def _conversation(one: Example, draw: random.Random, right: float) -> dict[str, Any]:
    answer = one.answer if draw.random() < right else draw.choice(ANSWERS[one.question])
    return {"messages": [_user(one.question), {"role": "assistant", "content": answer}], "images": _images(one)}
