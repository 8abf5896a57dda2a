"""`python -m jobs.prepare json`: rows in verl's form become parquet, from every format that holds them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.prepare import parquet
from jobs.prepare.__main__ import main
from pipeline.prompts.files import resolve

ROWS: list[dict[str, Any]] = [
    {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": f"{number} + 1 = ?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number, "late": number} if number > 5 else {"index": number},
    }
    for number in range(10)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def saved_by_datasets(folder: Path) -> Path:
    folder.mkdir()
    table = pa.Table.from_pylist(ROWS[6:])
    with pa.ipc.new_stream(str(folder / "rows.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "rows.arrow"}]}')
    return folder


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", LINES.encode()),
        ("rows.ndjson.gz", gzip.compress(LINES.encode())),
        ("rows.json", json.dumps(ROWS, indent=2).encode()),
    ],
)
def test_json_becomes_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP", 4)
    (tmp_path / name).write_bytes(content)
    assert main(["json", "--input", str(tmp_path / name), "--out", str(tmp_path / "out")]) == 0
    rows = pq.read_table(tmp_path / "out" / "rows.parquet").to_pylist()
    # Fields that only later rows have are null in earlier ones.
    assert rows == [{**row, "extra_info": {"late": None} | row["extra_info"]} for row in ROWS]
    assert sum(resolve(str(tmp_path / "out"), "data.train_files")[0].row_groups) == len(ROWS)


def test_a_folder_that_datasets_saved_becomes_parquet(tmp_path: Path) -> None:
    folder = saved_by_datasets(tmp_path / "saved")
    assert main(["json", "--input", str(folder), "--out", str(tmp_path / "out")]) == 0
    assert pq.read_table(tmp_path / "out" / "rows.parquet").to_pylist() == ROWS[6:]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "there is no such file"),
        ('{"a": 1}\n{"a"', "rows.jsonl, line 2: not JSON"),
        ("[1]\n", "entry 0 is a int where an object is needed"),
        ('{"a": 1}\n{"a": "x"}\n', "a column holds values of two types"),
    ],
)
def test_what_cannot_be_converted_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    if content:
        (tmp_path / "rows.jsonl").write_text(content)
    assert main(["json", "--input", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*.parquet"))
