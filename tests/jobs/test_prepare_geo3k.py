"""Geometry3K: rows in verl's format with their drawings, and bad rows named by their place."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.reward.rules import rule_of
from tests.jobs.prepared import prepare, read
from tests.pictures import picture

TYPE = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
PROBLEMS: list[dict[str, Any]] = [
    {"images": [{"bytes": picture(1), "path": None}], "problem": "<image>Find $x$.", "answer": "3"},
    {
        "images": [{"bytes": picture(2), "path": "a.png"}, {"bytes": picture(3), "path": None}],
        "problem": "<image> and <image>: are they alike?",
        "answer": "\\frac{1}{2}",
    },
]


def write(folder: Path, rows: list[dict[str, Any]], name: str = "train") -> None:
    """Write a file as on the hub."""
    schema = pa.schema([("images", TYPE), ("problem", pa.string()), ("answer", pa.string())])
    (folder / "data").mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / f"data/{name}-00000-of-00001.parquet")


def test_rows_in_verls_format(tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):
        write(tmp_path, PROBLEMS, split)
    assert prepare("geo3k", tmp_path, out=tmp_path / "out") == 0
    for split in ("train", "validation", "test"):
        rows = read(tmp_path / "out" / f"{split}.parquet")
        assert len(rows) == 2
        for index, (row, problem) in enumerate(zip(rows, PROBLEMS, strict=True)):
            assert row["images"] == problem["images"] and row["data_source"] == "hiyouga/geometry3k"
            (message,) = row["prompt"]
            assert message["role"] == "user" and message["content"].startswith(problem["problem"] + " You FIRST think")
            assert row["reward_model"] == {"style": "rule", "ground_truth": problem["answer"]}
            assert (row["extra_info"]["split"], row["extra_info"]["index"]) == (split, index)
            answer = f"<think>so</think> \\boxed{{{problem['answer']}}}"
            assert rule_of(row["data_source"])(answer, problem["answer"])["score"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images": []}, "'images' must be a list of images with their bytes"),
        ({"images": [{"bytes": None, "path": "a.png"}]}, "'images' must be a list of images with their bytes"),
        ({"problem": "Find x."}, "<image> stands 0 times in 'problem', which has 1 images"),
        ({"answer": ""}, "'answer' must be text"),
    ],
)
def test_bad_rows_are_named(
    tmp_path: Path, change: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, [PROBLEMS[1], PROBLEMS[0] | change])
    code = prepare("geo3k", tmp_path, out=tmp_path / "out")
    errors = capsys.readouterr().err
    assert code == 2 and "train-00000-of-00001.parquet, row 2: " in errors and words in errors
    assert not (tmp_path / "out" / "train.parquet").exists()
