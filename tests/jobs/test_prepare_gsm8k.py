"""`python -m jobs.prepare gsm8k`: rows in verl's format, and bad input named by file and line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.prepare import parquet
from jobs.prepare.__main__ import main
from pipeline.reward.rules import rule_of
from pipeline.reward.rules.gsm8k import compute_score

PROBLEMS = [
    {"question": "Ada has 3 boxes of 400 nails. How many?", "answer": "3 * 400 = <<3*400=1200>>1,200\n#### 1,200"},
    {"question": "It is 5 \u00b0C and falls by 12. What is it?", "answer": "5 - 12 = <<5-12=-7>>-7 degrees\n#### -7"},
    {"question": "Half of 9?", "answer": "9 / 2 = <<9/2=4.5>>4.5\n#### 4.5"},
]
TRUTHS = ["1200", "-7", "4.5"]


def write(path: Path, problems: list[dict[str, str]]) -> Path:
    text = "".join(f"{json.dumps(problem)}\n" for problem in problems).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def test_rows_in_verls_format(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", PROBLEMS)
    write(tmp_path / "test.jsonl.gz", PROBLEMS[::-1])
    (tmp_path / "README").write_text("not data")
    out = tmp_path / "out"
    assert main(["gsm8k", "--input", str(tmp_path), "--out", str(out)]) == 0
    assert sorted(file.name for file in out.iterdir()) == ["test.parquet", "train.parquet"]
    for split, problems, truths in (("train", PROBLEMS, TRUTHS), ("test", PROBLEMS[::-1], TRUTHS[::-1])):
        rows = read(out / f"{split}.parquet")
        for index, (row, problem, truth) in enumerate(zip(rows, problems, truths, strict=True)):
            content = (
                problem["question"] + ' Let\'s think step by step and output the final answer after "####".'
            )  # verl's words, so that its files and ours ask the same
            assert row == {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": content}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {"split": split, "index": index, **problem},
            }


def test_solutions_score_by_the_rule_of_their_rows(tmp_path: Path) -> None:
    source = write(tmp_path / "train.jsonl", PROBLEMS)
    assert main(["gsm8k", "--input", str(source), "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "train.parquet")
    assert len(rows) == 3
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        answer, truth = row["extra_info"]["answer"], row["reward_model"]["ground_truth"]
        assert rule_of(row["data_source"])(answer, truth)["score"] == 1.0  # type: ignore[index]
        assert compute_score(answer, truth, "strict")["score"] == 1.0
        assert compute_score(other["extra_info"]["answer"], truth)["score"] == 0.0


def test_files_by_name_blank_lines_and_only_the_splits_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    train, test = write(first / "train.jsonl", PROBLEMS), write(second / "test.jsonl", PROBLEMS[:1])
    train.write_text("\n" + train.read_text().replace("\n", "\r\n \n"))
    assert main(["gsm8k", "--input", str(train), str(test), "--out", str(tmp_path / "both")]) == 0
    both = {path.name: read(path) for path in (tmp_path / "both").iterdir()}
    assert [row["extra_info"]["index"] for row in both["train.parquet"]] == [0, 1, 2]
    assert len(both["test.parquet"]) == 1
    assert "train.parquet: 3 problems" in capsys.readouterr().out
    assert main(["gsm8k", "--input", str(second), "--out", str(tmp_path / "one")]) == 0
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["test.parquet"]


def test_rows_are_written_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP", 2)
    source = write(tmp_path / "train.jsonl", PROBLEMS)
    assert main(["gsm8k", "--input", str(source), "--out", str(tmp_path)]) == 0
    assert pq.read_metadata(tmp_path / "train.parquet").num_row_groups == 2


GOOD = json.dumps(PROBLEMS[0]).encode()


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (b"{", "line 3: not JSON"),
        (b"[" * 100_000, "line 3: not JSON"),
        (b"\xff", "line 3: not UTF-8"),
        (b"[]", "line 3: must be an object with 'question' and 'answer', not a list"),
        (b'{"question": "Q"}', "line 3: 'answer' must be text, not 'None'"),
        (b'{"answer": "#### 1"}', "line 3: 'question' must be text"),
        (b'{"question": " ", "answer": "#### 1"}', "line 3: 'question' must be text"),
        (b'{"question": 7, "answer": "#### 1"}', "line 3: 'question' must be text, not '7'"),
        (b'{"question": "\\ud800", "answer": "#### 1"}', "line 3: 'question' cannot be written as UTF-8"),
        (b'{"question": "Q", "answer": "It is 1."}', "line 3: 'answer' has no number after ####"),
        (b'{"question": "Q", "answer": "#### one"}', "line 3: 'answer' has no number after ####"),
        (b'{"question": "Q", "answer": "#### 1.2.3"}', "line 3: 'answer' has no number after ####"),
    ],
)
def test_a_malformed_line_is_named_and_nothing_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: bytes, part: str
) -> None:
    write(tmp_path / "train.jsonl", PROBLEMS)
    assert main(["gsm8k", "--input", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    (tmp_path / "test.jsonl").write_bytes(b"\n".join([GOOD, b"", bad, GOOD]))
    capsys.readouterr()
    assert main(["gsm8k", "--input", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert sentence.startswith("python -m jobs.prepare gsm8k: ") and f"test.jsonl, {part}" in sentence
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def cut(path: Path) -> None:
    path.write_bytes(gzip.compress(GOOD * 1000)[:-20])


@pytest.mark.parametrize(
    ("make", "name", "part"),
    [
        (lambda path: None, "train.jsonl", "train.jsonl does not exist"),
        (lambda path: path.mkdir(), "folder", "folder holds none of train.jsonl, train.jsonl.gz, test.jsonl"),
        (lambda path: path.write_bytes(GOOD), "gsm8k.jsonl", "gsm8k.jsonl must be named one of train.jsonl"),
        (lambda path: path.write_bytes(b"\n"), "train.jsonl", "train.jsonl holds no problems"),
        (lambda path: path.write_bytes(GOOD), "train.jsonl.gz", "train.jsonl.gz cannot be read after line 0"),
        (cut, "train.jsonl.gz", "train.jsonl.gz cannot be read after line"),
    ],
)
def test_bad_input_gives_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, name: str, part: str
) -> None:
    make(tmp_path / name)
    out = tmp_path / "out"
    assert main(["gsm8k", "--input", str(tmp_path / name), "--out", str(out)]) == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert part in sentence
    assert not out.exists() or not list(out.iterdir())


def test_two_files_for_one_split_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "train.jsonl", PROBLEMS)
    write(tmp_path / "train.jsonl.gz", PROBLEMS)
    assert main(["gsm8k", "--input", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "two files for train" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "train.jsonl", PROBLEMS)
    (tmp_path / "file").write_text("")
    assert main(["gsm8k", "--input", str(source), "--out", str(tmp_path / "file")]) == 1
    assert "cannot write to" in capsys.readouterr().err
