"""`python -m jobs.prepare blocks`: answers fit to pictures, and tell nothing without them."""

import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jobs.prepare.__main__ import main
from jobs.prepare.blocks import ANSWERS, BACKGROUND, CELL, COLOUR, COLOURS, COUNT
from pipeline.reward.rules import rule_of
from tests.jobs.prepared import contents, read


def seen(row: dict[str, Any]) -> tuple[int, set[str]]:
    """The number of blocks in the picture of a row, and their colours."""
    [image] = row["images"]
    pixels = np.asarray(Image.open(io.BytesIO(image["bytes"])))
    assert pixels.shape == (2 * CELL, 2 * CELL, 3)
    cells = [pixels[y : y + CELL, x : x + CELL].reshape(-1, 3) for y in (0, CELL) for x in (0, CELL)]
    found = [{tuple(map(int, pixel)) for pixel in np.unique(cell, axis=0)} - {BACKGROUND} for cell in cells]
    names = {rgb: name for name, rgb in COLOURS.items()}
    return sum(map(bool, found)), {names[rgb] for cell in found for rgb in cell}


def test_answers_fit_to_the_pictures(tmp_path: Path) -> None:
    assert main(["blocks", "--out", str(tmp_path), "--train", "300", "--test", "100", "--seed", "3"]) == 0
    for split, size in (("train", 300), ("test", 100)):
        rows = read(tmp_path / f"{split}.parquet")
        assert len(rows) == size
        truths: Counter[str] = Counter()
        for index, row in enumerate(rows):
            [message] = row["prompt"]
            question = message["content"].removeprefix("<image>")
            number, (colour,) = seen(row)
            truth = row["reward_model"]["ground_truth"]
            assert truth == {COUNT: str(number), COLOUR: colour}[question]
            assert rule_of(row["data_source"])(f" {truth.upper()}\n", truth)["score"] == 1
            assert row["extra_info"] == {"split": split, "index": index}
            truths[truth] += 1
        # Half of the questions are of each kind, and no answer is more frequent than the others.
        assert len(truths) == 8 and max(truths.values()) < size / 4


def test_the_share_of_right_answers_in_the_warm_start(tmp_path: Path) -> None:
    # One of 4 random answers is right by chance.
    for name, given, least, most in (("a", "0.2", 0.35, 0.45), ("b", "1", 1, 1)):
        out = tmp_path / name
        assert main(["blocks", "--out", str(out), "--sft", "800", "--train", "1", "--sft-right", given]) == 0
        rows = read(out / "sft_train.parquet")
        right = 0
        for row in rows:
            question, answer = (message["content"] for message in row["messages"])
            number, (colour,) = seen(row)
            assert answer in ANSWERS[question.removeprefix("<image>")]
            right += answer in (str(number), colour)
        assert least <= right / len(rows) <= most


def test_the_seed_decides_and_no_file_depends_on_the_size_of_another(tmp_path: Path) -> None:
    for name, seed, train in (("a", "1", "30"), ("b", "1", "30"), ("c", "2", "30"), ("d", "1", "40")):
        assert main(["blocks", "--out", str(tmp_path / name), "--seed", seed, "--train", train, "--sft", "20"]) == 0
    a, b, c, d = (contents(tmp_path / name) for name in "abcd")
    assert a == b and all(a[name] != c[name] for name in a)
    assert [name for name in a if a[name] != d[name]] == ["train.parquet"]


def test_blank_pictures_keep_questions_and_answers(tmp_path: Path) -> None:
    for name, more in (("a", []), ("b", ["--blank"])):
        assert main(["blocks", "--out", str(tmp_path / name), "--train", "20", "--sft", "5", *more]) == 0
    shown, blank = (read(tmp_path / name / "train.parquet") for name in "ab")
    assert [row["prompt"] for row in shown] == [row["prompt"] for row in blank]
    assert [row["reward_model"] for row in shown] == [row["reward_model"] for row in blank]
    assert {seen(row)[0] for row in blank} == {0}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--train", "0"), "--train is 0, but must be at least 1"),
        (("--sft-test", "0"), "--sft-test is 0, but must be at least 1"),
        (("--sft-right", "1.5"), "--sft-right is 1.5, but must be between 0 and 1"),
        (("--sft-right", "nan"), "--sft-right is nan, but must be between 0 and 1"),
    ],
)
def test_options_that_cannot_be_met(
    options: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["blocks", "--out", str(tmp_path / "x"), *options]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "x").exists()
