"""`python -m jobs.prepare pairs`: the scored answers of a run or an evaluation become preference pairs."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.prepare.__main__ import main
from pipeline.config.preference import DPODataConfig
from pipeline.supervised.dpo_data import DPOEncoder


def answers(uid: str, scores: list[float | None], **more: Any) -> list[dict[str, Any]]:
    """One group; an answer's text is its score, and a score of None is a failed reward."""
    prompt = json.dumps([{"role": "user", "content": f"question {uid}"}])
    failed = [None if score is not None else "boom" for score in scores]
    return [
        {"uid": uid, "data_source": "mine", "prompt": prompt, "response": f"{score}", "score": score or 0.0}
        | {"reward_error": error, **more}
        for score, error in zip(scores, failed, strict=True)
    ]


def write(path: Path, *groups: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([row for group in groups for row in group]), path)
    return path


def made(folder: Path, *options: str) -> list[tuple[str, str, str, float]]:
    assert main(["pairs", "--from", str(folder), "--out", str(folder / "out"), *options]) == 0
    rows = pq.read_table(folder / "out" / "train.parquet").to_pylist()
    return [
        tuple(row[name][0]["content"] for name in ("prompt", "chosen", "rejected")) + (row["margin"],) for row in rows
    ]


def test_the_best_and_the_worst_answer_of_a_group_are_a_pair(tmp_path: Path) -> None:
    groups = answers("a", [0.5, 1.0, 0.0, None]), answers("b", [1.0, 1.0]), answers("c", [None, 0.0, 0.25, 2.0])
    write(tmp_path / "trajectories/iteration=000001/chunk-000000.parquet", *groups[:2])
    write(tmp_path / "trajectories/iteration=000002/chunk-000001.parquet", groups[2])
    write(tmp_path / "validation/iteration=000002/chunk-000001.parquet", answers("v", [0.0, 1.0]))
    best = [("question a", "1.0", "0.0", 1.0), ("question c", "2.0", "0.0", 2.0)]
    assert made(tmp_path) == best
    assert made(tmp_path, "--min-gap", "1.5") == best[1:]
    assert made(tmp_path, "--per-prompt", "3") == best  # the middle one of three answers has no partner


def test_a_begun_answer_is_part_of_both_sides(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So "}]
    group = answers("a", [0.0, 1.0], prompt=json.dumps(prompt))
    write(tmp_path / "responses/part-000000.parquet", [row | {"response": f"So {row['score']}"} for row in group])
    made(tmp_path)
    (row,) = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert row["prompt"] == prompt[:1]
    assert [row[side][0]["content"] for side in ("chosen", "rejected")] == ["So 1.0", "So 0.0"]


def test_further_pairs_of_a_group_never_share_an_answer(tmp_path: Path) -> None:
    write(tmp_path / "responses/part-000000.parquet", answers("a", [0.0, 1.0, 0.2, 0.8, 0.5]))
    pairs = [("question a", "1.0", "0.0", 1.0), ("question a", "0.8", "0.2", pytest.approx(0.6))]
    assert made(tmp_path, "--per-prompt", "9") == pairs


def test_prompts_are_held_out_as_a_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "responses/part-000000.parquet", *(answers(f"{i % 40}", [0.0, 1.0]) for i in range(40)))
    write(tmp_path / "responses/part-000001.parquet", *(answers(f"{i % 40}", [0.0, 2.0]) for i in range(40)))
    train = {pair[0] for pair in made(tmp_path, "--test-share", "0.3")}
    test = {row["prompt"][0]["content"] for row in pq.read_table(tmp_path / "out/test.parquet").to_pylist()}
    assert train | test == {f"question {i}" for i in range(40)} and not train & test and 4 <= len(test) <= 20
    assert f"train.parquet: {2 * len(train)} pairs; 0 groups" in capsys.readouterr().out


def test_jobs_dpo_reads_what_is_written(tmp_path: Path) -> None:
    write(tmp_path / "responses/part-000000.parquet", answers("a", [0.0, 1.0]))
    made(tmp_path)
    groups = DPOEncoder.find_row_groups(str(tmp_path / "out/train.parquet"), "data.train_files", DPODataConfig())
    assert [group.rows for group in groups] == [1]


@pytest.mark.parametrize(
    ("groups", "options", "sentence"),
    [
        ([answers("a", [1.0, 1.0])], [], "none of 1 groups of answers gives a pair for train.parquet"),
        (
            [answers("a", [0.0, 1.0])],
            ["--min-gap", "2"],
            "to one prompt whose scores differ by at least --min-gap 2 (roll",
        ),
        ([[{"uid": "a", "prompt": "[]"}]], [], "f.parquet has no column 'data_source', but uid, prompt"),
        ([answers("a", [0.0, 1.0], messages="[]")], [], "f.parquet has episodes of several turns"),
        ([answers("a", [0.0, 1.0])], ["--per-prompt", "0"], "--per-prompt 0 must be at least 1"),
        ([answers("a", [0.0, 1.0])], ["--min-gap", "-1"], "--min-gap -1 must be at least 0"),
        ([answers("a", [0.0, 1.0])], ["--test-share", "1"], "--test-share 1 must be at least 0 and below 1"),
    ],
)
def test_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], groups: Any, options: list[str], sentence: str
) -> None:
    write(tmp_path / "f.parquet", *groups)
    assert main(["pairs", "--from", str(tmp_path / "f.parquet"), "--out", str(tmp_path / "out"), *options]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out/train.parquet").exists()


def test_inputs_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.parquet").write_text("text")
    for name, sentence in {
        "missing": "missing: no such file or folder",
        "empty": "empty holds no parquet file",
        "text.parquet": "text.parquet cannot be read as parquet",
    }.items():
        assert main(["pairs", "--from", str(tmp_path / name), "--out", str(tmp_path / "out")]) == 2
        assert sentence in capsys.readouterr().err
