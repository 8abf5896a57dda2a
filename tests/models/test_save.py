"""The written folder of a model takes its place."""

import errno
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from pipeline.models.save import take_place, written_whole


def _partial(tmp_path: Path) -> Path:
    partial = tmp_path / ".model.partial"
    (partial / "adapter").mkdir(parents=True)
    (partial / "config.json").write_text("{}")
    (partial / "adapter" / "weights").write_text("w")
    return partial


def test_a_folder_that_another_disk_is_mounted_at_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    number, partial = folder.stat().st_ino, _partial(tmp_path)
    rename = Path.rename

    def mounted(path: Path, target: Any) -> Path:
        if Path(target) == folder:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", mounted)
    take_place(partial, folder, replace=False)
    assert (folder / "adapter" / "weights").read_text() == "w" and (folder / "config.json").is_file()
    assert folder.stat().st_ino == number and not partial.exists()


def test_a_folder_that_was_filled_meanwhile_stays(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "notes").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        take_place(_partial(tmp_path), folder, replace=False)
    assert [path.name for path in folder.iterdir()] == ["notes"]


@pytest.mark.parametrize(
    "error", [SafetensorError("I/O error: No space left on device"), OSError(28, "full"), KeyboardInterrupt()]
)
def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    """safetensors has an error of its own for a full disk."""
    folder = tmp_path / "model"
    kind = OSError if isinstance(error, Exception) else KeyboardInterrupt
    with pytest.raises(kind) as raised, written_whole(folder) as partial:
        (partial / "a.safetensors").write_text("half")
        raise error
    assert not list(tmp_path.iterdir())
    if isinstance(error, SafetensorError):
        assert str(raised.value) == f"{folder} could not be written: I/O error: No space left on device"
    with written_whole(folder) as partial:
        (partial / "a.safetensors").touch(0o600)
    assert (folder / "a.safetensors").stat().st_mode & 0o777 == 0o644
