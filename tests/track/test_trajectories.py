"""Trajectories are written whole, found again, and replaced by a retry."""

import errno
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.rows import CONTEXTS, RUNS, SCHEMA, SPANS
from pipeline.track.trajectories import Record, discard_trajectories, read_trajectories, why_unrecorded


def _rows(iteration: int, chunk: int, *, split: str = "train", offset: int = 0, rows: int = 3) -> pa.Table:
    columns: dict[str, list] = {}
    for field in SCHEMA:
        if field.type == RUNS:
            columns[field.name] = [[{"version": 1, "tokens": 2}]] * rows
        elif field.type == SPANS:
            columns[field.name] = [[{"kind": 1, "tokens": 2, "reward": None}]] * rows
        elif field.type == CONTEXTS:
            columns[field.name] = [[{"prompt": [3], "tokens": 2}]] * rows
        elif pa.types.is_list(field.type) or pa.types.is_large_list(field.type):
            binary = pa.types.is_binary(field.type.value_type)
            columns[field.name] = [[b"png"] if binary else [1, 2]] * rows
        elif pa.types.is_string(field.type):
            columns[field.name] = ["text"] * rows
        else:
            columns[field.name] = [0] * rows
    columns |= {"split": [split] * rows, "iteration": [iteration] * rows, "chunk": [chunk] * rows}
    columns |= {"offset": list(range(offset, offset + rows))}
    columns |= {"uid": [f"{split}/{chunk}/{offset + row}" for row in range(rows)]}
    return pa.table(columns, schema=SCHEMA.remove_metadata())


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_rows_pass_unchanged_and_come_back_equal(tmp_path: Path) -> None:
    record = Record(str(tmp_path))
    second, first = _rows(3, 7), _rows(3, 6)
    assert record(second) is second
    record(first)
    assert _files(tmp_path) == [f"trajectories/iteration=000003/chunk-00000{chunk}.parquet" for chunk in (6, 7)]
    assert read_trajectories(str(tmp_path), 3).equals(pa.concat_tables([first, second]))
    metadata = pq.ParquetFile(tmp_path / "trajectories/iteration=000003/chunk-000006.parquet").metadata
    assert metadata.row_group(0).column(0).compression == "ZSTD"


def test_a_retried_chunk_replaces_itself(tmp_path: Path) -> None:
    for _ in range(2):
        Record(str(tmp_path))(_rows(1, 0))
        Record(str(tmp_path))(_rows(0, -1, split="val", offset=4))
    assert len(_files(tmp_path)) == 2
    assert len(read_trajectories(str(tmp_path), 1)) == len(read_trajectories(str(tmp_path), 0, "val")) == 3


def test_validation_chunks_keep_apart_and_in_order(tmp_path: Path) -> None:
    record = Record(str(tmp_path))
    for offset in (9, 0, 3, 6):
        record(_rows(5, -1, split="val", offset=offset))
    assert all(name.startswith("validation/iteration=000005/chunk-") for name in _files(tmp_path))
    assert read_trajectories(str(tmp_path), 5, "val")["offset"].to_pylist() == list(range(12))


def test_folder_opens_in_pandas_as_one_data_set(tmp_path: Path) -> None:
    record = Record(str(tmp_path))
    record(_rows(1, 0))
    record(_rows(2, 1))
    (tmp_path / "trajectories/iteration=000002/.left-by-a-kill.tmp").write_bytes(b"half")
    frame = pd.read_parquet(tmp_path / "trajectories")
    assert frame["iteration"].astype(int).tolist() == [1, 1, 1, 2, 2, 2]


def test_url_of_a_filesystem(tmp_path: Path) -> None:
    Record(f"file://{tmp_path}/run")(_rows(1, 0))
    assert _files(tmp_path) == ["run/trajectories/iteration=000001/chunk-000000.parquet"]
    assert len(read_trajectories(f"file://{tmp_path}/run", 1)) == 3


def test_wrong_folders_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="'runs/a' is relative"):
        Record("runs/a")
    with pytest.raises(ValueError, match="'nosuch://a' is on no file system"):
        Record("nosuch://a")


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "trajectories").write_text("a file stands where the folder should be")
    with pytest.raises(OSError, match=r"cannot be written to .*iteration=000001/chunk-000000\.parquet"):
        Record(str(tmp_path))(_rows(1, 0))


def test_a_disk_that_takes_nothing_more_is_told_from_one_that_may(tmp_path: Path) -> None:
    (tmp_path / "trajectories").write_text("a file stands where the folder should be")
    with pytest.raises(OSError, match="cannot be written") as error:
        Record(str(tmp_path))(_rows(1, 0))
    sentence = why_unrecorded(error.value)
    assert sentence is not None and sentence.startswith("the trajectories cannot be written to ")
    assert sentence.endswith("choose another folder with `trainer.default_local_dir`")
    assert why_unrecorded(RuntimeError(f"of Ray: {error.value}\nand more")) == sentence
    for other in (str(error.value).replace("Not a directory", "away"), "No space left on device"):
        assert why_unrecorded(OSError(5, other)) is None


def test_storage_that_answers_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Away:
        def create_dir(self, path: str, recursive: bool) -> None:
            raise OSError(errno.EIO, "no connection")

        def get_file_info(self, path: str) -> None:
            raise OSError(errno.EIO, "no connection")

    record = Record(str(tmp_path))
    monkeypatch.setattr(record, "_filesystem", Away())
    with pytest.raises(OSError, match="trajectories cannot be written to .*chunk-000000.parquet"):
        record(_rows(1, 0))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(str(tmp_path))
    record(_rows(1, 0))

    class Full:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def open_output_stream(self, path: str) -> object:
            os.symlink("/dev/full", path)
            return real.open_output_stream(path)

    real = record._filesystem
    monkeypatch.setattr(record, "_filesystem", Full())
    with pytest.raises(OSError, match="chunk-000001.parquet") as caught:
        record(_rows(1, 1))
    assert caught.value.errno in (errno.ENOSPC, errno.EIO)
    assert [path.name for path in (tmp_path / "trajectories/iteration=000001").iterdir()] == ["chunk-000000.parquet"]


def test_missing_iteration_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there are none at all"):
        read_trajectories(str(tmp_path), 1)
    Record(str(tmp_path))(_rows(4, 0))
    with pytest.raises(FileNotFoundError, match="iterations 4 to 4 are there"):
        read_trajectories(str(tmp_path), 1)


def test_discard_removes_the_abandoned_try(tmp_path: Path) -> None:
    record = Record(str(tmp_path))
    for iteration in range(1, 5):
        record(_rows(iteration, iteration))
    for version in (0, 2, 3):
        record(_rows(version, -1, split="val"))
    assert discard_trajectories(str(tmp_path), 3) == [3, 4]
    assert [name.split("/chunk")[0] for name in _files(tmp_path)] == [
        "trajectories/iteration=000001",
        "trajectories/iteration=000002",
        "validation/iteration=000000",
        "validation/iteration=000002",
    ]
    assert discard_trajectories(str(tmp_path / "nothing"), 1) == []


def test_old_log_probs_stand_beside_the_rows_and_go_with_them(tmp_path: Path) -> None:
    rows = pa.concat_tables([_rows(3, 7), _rows(3, 6)])
    record = Record(str(tmp_path))
    record(rows)
    record.old_log_probs(rows, 3, rank=1, old_log_probs=np.arange(12, dtype=np.float32))
    read = read_trajectories(str(tmp_path), 3, "old_log_probs")
    assert read["uid"].equals(rows["uid"]) and read["sample"].equals(rows["sample"])
    assert read["old_log_probs"].to_pylist() == [[2.0 * row, 2.0 * row + 1] for row in range(6)]
    assert read_trajectories(str(tmp_path), 3).num_rows == 6
    discard_trajectories(str(tmp_path), 3)
    assert _files(tmp_path) == []
