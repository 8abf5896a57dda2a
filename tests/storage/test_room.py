"""Room for a checkpoint on a disk."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.storage import room
from pipeline.storage.room import STORAGE_REMEDY, lacking, used


def test_the_disk_of_the_nearest_folder_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def usage(place: Path) -> SimpleNamespace:
        asked.append(place)
        return SimpleNamespace(free=3 * 2**20)

    monkeypatch.setattr(room.shutil, "disk_usage", usage)
    place = f"{tmp_path}/later/run"
    assert lacking(place, 3 * 2**20, STORAGE_REMEDY) is None
    assert lacking(place, 2**30, STORAGE_REMEDY) == (
        f"{place} has 3 MiB free, and a checkpoint needs 1,024 MiB there; make room, or name another place "
        "(trainer.storage_path)"
    )
    assert asked == [tmp_path, tmp_path]
    # What another storage has left cannot be asked.
    assert lacking("memory://bucket/run", 2**60, STORAGE_REMEDY) is None and len(asked) == 2


def test_a_run_says_what_its_folder_takes(tmp_path: Path) -> None:
    assert used(tmp_path) == "0 MiB"
    for name, mib in (("checkpoints/iteration_000001/a", 3), ("model/b", 2), ("trajectories/c", 1), ("console.log", 1)):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(mib * 2**20))
    (tmp_path / "model" / "link").symlink_to(tmp_path / "gone")
    assert used(tmp_path) == "7 MiB (checkpoints 3 MiB, model 2 MiB, trajectories 1 MiB)"
