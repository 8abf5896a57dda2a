"""`python -m jobs.prepare sums`: right sums, each pair once, the same ones for a seed."""

import re
from pathlib import Path

import pytest

from jobs.prepare.__main__ import main
from pipeline.reward.rules import rule_of
from tests.jobs.prepared import contents, read


def test_sums_are_right_and_no_pair_comes_twice(tmp_path: Path) -> None:
    assert main(["sums", "--out", str(tmp_path), "--train", "3895", "--seed", "3"]) == 0
    pairs = []
    for split, size in (("test", 200), ("train", 3895)):
        rows = read(tmp_path / f"{split}.parquet")
        assert len(rows) == size
        for index, row in enumerate(rows):
            [message] = row["prompt"]
            one, other = map(int, re.findall(r"\d+", message["content"]))
            assert message == {"role": "user", "content": f"What is {one} + {other}? Answer with the number only."}
            truth = row["reward_model"]["ground_truth"]
            assert truth == str(one + other) and 10 <= min(one, other) <= max(one, other) <= 99
            assert rule_of(row["data_source"])(truth, truth)["score"] == 1
            assert row["extra_info"] == {"split": split, "index": index}
            pairs.append((one, other))
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) == 90 * 91 // 2
    # The smaller number is not always the first one.
    assert 0.4 < sum(one > other for one, other in pairs) / len(pairs) < 0.6


def test_the_seed_decides_and_the_test_file_does_not_depend_on_the_training(tmp_path: Path) -> None:
    for name, seed, train in (("a", "1", "30"), ("b", "1", "30"), ("c", "2", "30"), ("d", "1", "40")):
        assert main(["sums", "--out", str(tmp_path / name), "--seed", seed, "--train", train]) == 0
    a, b, c, d = (contents(tmp_path / name) for name in "abcd")
    assert a == b and a["test.parquet"] != c["test.parquet"]
    questions = [[row["prompt"] for row in read(tmp_path / name / "test.parquet")] for name in "ad"]
    assert questions[0] == questions[1] and a["train.parquet"] != d["train.parquet"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--train", "4000"), "need 4,200 pairs, but the 90 numbers from --smallest to --largest give 4,095"),
        (("--test", "0"), "--test is 0, but must be at least 1"),
        (("--smallest", "100"), "the 0 numbers from --smallest to --largest give 0"),
    ],
)
def test_options_that_cannot_be_met(
    options: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sums", "--out", str(tmp_path / "x"), *options]) == 2
    assert sentence in capsys.readouterr().err and contents(tmp_path / "x") == {}
