"""Folders and files that a run goes on to write are tried before it begins."""

import errno
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import ConfigError
from pipeline.storage import targets
from pipeline.storage.targets import FILES, FOLDERS, try_targets


def test_nothing_is_left_where_all_can_be_written(tmp_path: Path) -> None:
    run_dir, store = tmp_path / "run", tmp_path / "mlflow.db"
    for name in FOLDERS:
        (run_dir / name).mkdir(parents=True)
    (run_dir / FILES[0]).write_text("{}")
    store.write_text("tables")
    before = sorted(tmp_path.rglob("*"))
    try_targets(run_dir, store)
    assert sorted(tmp_path.rglob("*")) == before and store.read_text() == "tables"
    assert (run_dir / FILES[0]).read_text() == "{}"
    try_targets(run_dir, None)


@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
def test_what_is_of_another_kind_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("") if name in FOLDERS else (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=rf"^the run cannot write (into )?{tmp_path}/{name}: \w.+; free space, allow"):
        try_targets(tmp_path, None)


@pytest.mark.parametrize("folder", ["", "trajectories"])
def test_a_disk_that_takes_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    (tmp_path / "trajectories").mkdir()
    real = tempfile.TemporaryFile

    def full(dir: Path) -> Any:
        if dir == tmp_path / folder:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(dir=dir)

    monkeypatch.setattr(targets.tempfile, "TemporaryFile", full)
    with pytest.raises(ConfigError, match=f"cannot write into {tmp_path / folder}: No space left on device; free"):
        try_targets(tmp_path, None)


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "mlflow.db").mkdir()
    with pytest.raises(ConfigError, match=f"^the run cannot write {tmp_path}/mlflow.db: Is a directory"):
        try_targets(tmp_path / "run", tmp_path / "mlflow.db")
