"""`python -m jobs.prepare math`: the data set's folders, the hub's files, and bad input named by file and line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.prepare.__main__ import main
from pipeline.reward.rules import rule_of

PROBLEMS = [
    {
        "problem": "What is $1+1$?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": "It is $\\boxed{3}$, no, $1+1=\\boxed{2}$.",
    },
    {
        "problem": "What is half of one?",
        "level": "Level 2",
        "type": "Algebra",
        "solution": "So $\\boxed{\\frac{1}{2}}$.",
    },
    {"problem": "Which one?", "level": "Level ?", "type": "Geometry", "solution": "$\\fbox{\\text{(B)}}$"},
]
TRUTHS = ["2", "\\frac{1}{2}", "\\text{(B)}"]
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."  # verl's words


def tree(folder: Path) -> Path:
    """The published form: a file for each problem, numbered, in folders by split and subject."""
    for split in ("train", "test"):
        for place, name in ((0, "algebra/2.json"), (1, "algebra/10.json"), (2, "geometry/1.json")):
            file = folder / split / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(PROBLEMS[place], indent=2))
    return folder


def prepare(*inputs: Path, out: Path, options: tuple[str, ...] = ()) -> int:
    return main(["math", "--input", *map(str, inputs), "--out", str(out), *options])


def read(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def expected(split: str, source: str = "DigitalLearningGmbH/MATH-lighteval") -> list[dict[str, Any]]:
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{problem['problem']} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": split, "index": index, **problem},
        }
        for index, (problem, truth) in enumerate(zip(PROBLEMS, TRUTHS, strict=True))
    ]


def test_folders_by_split_and_subject(tmp_path: Path) -> None:
    assert prepare(tree(tmp_path / "MATH"), out=tmp_path / "out") == 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["test.parquet", "train.parquet"]
    for split in ("train", "test"):
        assert read(tmp_path / "out" / f"{split}.parquet") == expected(split)


def test_one_split_by_its_own_folder(tmp_path: Path) -> None:
    assert prepare(tree(tmp_path / "MATH") / "test", out=tmp_path / "out") == 0
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["test.parquet"]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet"])
def test_files_of_the_hub(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"test{ending}"
    text = "".join(f"{json.dumps(problem)}\n" for problem in PROBLEMS).encode()
    if ending == ".parquet":
        pq.write_table(pa.Table.from_pylist(PROBLEMS), file)
    else:
        file.write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    source = "HuggingFaceH4/MATH-500"
    assert prepare(file, out=tmp_path / "out", options=("--data-source", source)) == 0
    assert read(tmp_path / "out" / "test.parquet") == expected("test", source)


def test_level_and_subject_as_in_math_500(tmp_path: Path) -> None:
    row = {"problem": "P", "solution": "\\boxed{1}", "answer": "1", "subject": "Algebra", "level": 5}
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    assert prepare(tmp_path, out=tmp_path) == 0
    (found,) = read(tmp_path / "test.parquet")
    assert (found["extra_info"]["level"], found["extra_info"]["type"]) == ("Level 5", "Algebra")


def test_solutions_score_by_the_rule_of_their_rows(tmp_path: Path) -> None:
    assert prepare(tree(tmp_path / "MATH"), out=tmp_path) == 0
    rows = read(tmp_path / "train.parquet")
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        rule = rule_of(row["data_source"])
        truth = row["reward_model"]["ground_truth"]
        assert rule(row["extra_info"]["solution"], truth)["score"] == 1.0  # type: ignore[index]
        assert rule(other["extra_info"]["solution"], truth)["score"] == 0.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (b'{\n "problem": "P",\n "solution": \n', "7.json, line 4: not JSON"),
        (b'{"problem": "P", "solution": "\\boxed{1}"', "7.json, line 1: not JSON"),
        (b"", "7.json, line 1: not JSON"),
        (b"[" * 100_000, "7.json: not JSON"),
        (b"\xff\xff\xff", "7.json: not JSON"),
        (b"[]", "7.json: must be an object with 'problem' and 'solution', not a list"),
        (b'{"problem": "P"}', "7.json: 'solution' must be text, not 'None'"),
        (b'{"problem": "", "solution": "S"}', "7.json: 'problem' must be text, not ''"),
        (b'{"problem": "\\ud800", "solution": "S"}', "7.json: 'problem' cannot be written as UTF-8"),
        (b'{"problem": "P", "solution": "It is 1."}', "7.json: 'solution' has no \\boxed{...} with an answer"),
        (b'{"problem": "P", "solution": "\\\\boxed{}"}', "7.json: 'solution' has no \\boxed{...} with an answer"),
        (b'{"problem": "P", "solution": "\\\\boxed{1"}', "7.json: 'solution' has no \\boxed{...} with an answer"),
    ],
)
def test_a_malformed_problem_is_named_and_nothing_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: bytes, part: str
) -> None:
    folder = tree(tmp_path / "MATH")
    assert prepare(folder, out=tmp_path / "out") == 0
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    (folder / "test" / "geometry" / "7.json").write_bytes(bad)
    capsys.readouterr()
    assert prepare(folder, out=tmp_path / "out") == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert sentence.startswith("python -m jobs.prepare math: ") and part in sentence
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def cut_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(PROBLEMS), path)
    path.write_bytes(path.read_bytes()[:-50])


def wrong_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([PROBLEMS[0], PROBLEMS[0] | {"solution": None}]), path)


GOOD = json.dumps(PROBLEMS[0]).encode()


@pytest.mark.parametrize(
    ("make", "name", "part"),
    [
        (lambda path: None, "MATH", "MATH must be named one of train.jsonl"),
        (lambda path: None, "train.jsonl", "train.jsonl does not exist"),
        (lambda path: path.mkdir(), "MATH", "MATH holds no folder train or test and none of train.jsonl"),
        (lambda path: path.mkdir(), "train", "train holds no problems"),
        (lambda path: path.write_bytes(b""), "train.jsonl", "train.jsonl holds no problems"),
        (lambda path: path.write_bytes(GOOD + b"\n{}"), "train.jsonl", "train.jsonl, line 2: 'problem' must be text"),
        (lambda path: path.write_bytes(gzip.compress(GOOD * 99)[:-9]), "test.jsonl.gz", "cannot be read after line 0"),
        (cut_parquet, "train.parquet", "train.parquet cannot be read after row 0"),
        (wrong_parquet, "train.parquet", "train.parquet, row 2: 'solution' must be text"),
    ],
)
def test_bad_input_gives_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, name: str, part: str
) -> None:
    make(tmp_path / name)
    assert prepare(tmp_path / name, out=tmp_path / "out") == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert part in sentence
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_two_sources_for_one_split_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tree(tmp_path / "MATH")
    (tmp_path / "train.jsonl").write_bytes(GOOD)
    assert prepare(folder, tmp_path / "train.jsonl", out=tmp_path / "out") == 2
    assert "two sources for train" in capsys.readouterr().err
    assert prepare(folder, folder / "test", out=tmp_path / "out") == 2
    assert "two folders for test" in capsys.readouterr().err
