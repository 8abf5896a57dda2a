"""Wrong labels of the GSM8K rule: none for its data, and what is counted if the rule is wrong."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import labels
from jobs.prepare.__main__ import main as prepare
from pipeline.reward.rules import gsm8k

SAMPLE = Path(__file__).parents[1] / "data" / "gsm8k"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = tmp_path_factory.mktemp("gsm8k")
    assert prepare(["gsm8k", "--input", str(SAMPLE), "--out", str(out)]) == 0
    return [str(path) for path in sorted(out.glob("*.parquet"))]


def test_no_label_is_wrong(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert labels.main(files) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2].partition(" rows")[0] for line in printed[:2]] == ["50", "150"]
    assert all("; 0 of " in line and "; 0 of 0 " not in line for line in printed[:2])
    assert printed[2:] == ["0 wrong labels"]


@pytest.mark.parametrize(
    ("score", "kind"), [(0.0, "right answers do not score 1"), (1.0, "wrong answers do not score 0")]
)
def test_wrong_labels_are_counted_both_ways(
    files: list[str], score: float, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rule(answer: str, truth: str) -> dict[str, Any]:
        return {"score": score}

    monkeypatch.setattr(gsm8k, "compute_score", rule)
    monkeypatch.setattr(labels, "rule_of", lambda source: rule)
    assert labels.main(files[:1]) == 1
    first, *shown, last = capsys.readouterr().out.splitlines()
    count = first.partition(f" {kind}")[0].rpartition(" ")[2]
    assert f"{count} of {count} {kind}" in first and last == f"{count} wrong labels" and len(shown) == labels.SHOWN


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"data_source": "countdown", "reward_model": {"ground_truth": "7"}, "extra_info": {"x": 1}},
            "row 0: data_source is",
        ),
        (
            {"data_source": "gsm8k", "reward_model": {"ground_truth": "7 apples"}, "extra_info": {"x": 1}},
            "row 0: reward_model",
        ),
        ({"data_source": "gsm8k"}, "expected parquet in verl's format"),
    ],
)
def test_a_file_of_something_else_is_refused(
    row: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    assert labels.main([str(tmp_path / "x.parquet")]) == 2
    assert words in capsys.readouterr().err
    assert labels.main([str(tmp_path / "none.parquet")]) == 2


def test_rows_without_a_solution_are_checked_by_their_truth(tmp_path: Path) -> None:
    row = {"data_source": "gsm8k", "reward_model": {"ground_truth": "1,007.5"}, "extra_info": {"index": 1}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    assert labels.main([str(tmp_path / "x.parquet")]) == 0
