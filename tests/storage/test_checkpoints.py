"""Which checkpoints are whole, which is the newest, and which go."""

import json
from pathlib import Path

import pytest

from pipeline.storage.checkpoints import Saved, find, iterations, newest, read, retain


def written(run_dir: Path, iteration: int, ranks: int = 2, marks: int | None = None) -> Path:
    """A checkpoint of `ranks` ranks, of which `marks` have written all they have."""
    folder = run_dir / "checkpoints" / f"iteration_{iteration:06d}"
    folder.mkdir(parents=True)
    (folder / "progress.json").write_text(json.dumps({"version": iteration, "world_size": ranks}))
    for rank in range(ranks if marks is None else marks):
        (folder / f"complete_{rank}").touch()
    return folder


def test_a_checkpoint_is_whole_with_the_last_file_of_each_rank(tmp_path: Path) -> None:
    assert newest(str(tmp_path)) is None
    whole = written(tmp_path, 4)
    half = written(tmp_path, 6, ranks=3, marks=2)
    (tmp_path / "checkpoints" / "iteration_000008").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_manager_snapshot.json").write_text("{")
    assert iterations(str(tmp_path)) == [4, 6, 8]
    assert newest(str(tmp_path)) == Saved(4, str(whole), {"version": 4, "world_size": 2})
    assert read(str(half)) is None
    (half / "complete_2").touch()
    assert newest(f"file://{tmp_path}").iteration == 6  # type: ignore[union-attr]


def test_find_takes_a_checkpoint_or_a_run(tmp_path: Path) -> None:
    first, _ = written(tmp_path, 2), written(tmp_path, 4)
    assert find(str(first)).iteration == 2 and find(str(tmp_path)).iteration == 4
    (first / "complete_1").unlink()
    with pytest.raises(ValueError, match=r"iteration_000002 has no complete checkpoint"):
        find(str(first))
    (first / "progress.json").write_text("{")
    with pytest.raises(ValueError, match=r"iteration_000002 is damaged: progress.json cannot be read"):
        find(str(first))


def test_the_newest_stay_and_those_to_be_spared(tmp_path: Path) -> None:
    for iteration in (2, 4, 6, 8, 10):
        written(tmp_path, iteration)
    written(tmp_path, 5, marks=1)
    written(tmp_path, 12, marks=0)
    assert retain(str(tmp_path), 10, 2, {4}) == [2, 5, 6]
    assert iterations(str(tmp_path)) == [4, 8, 10, 12]
    assert retain(str(tmp_path), 8, 1) == [4] and retain(str(tmp_path), 10, 2) == []


def test_folders_of_others_are_no_checkpoints(tmp_path: Path) -> None:
    written(tmp_path, 2)
    names = ("iteration_1", "iteration_000001_backup", "iteration_²", "iteration_000001.old", "notes")
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir()
    assert iterations(str(tmp_path)) == [2]
    written(tmp_path, 1_000_000)
    assert retain(str(tmp_path), 1_000_000, 1) == [2]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {*names, "iteration_1000000"}
