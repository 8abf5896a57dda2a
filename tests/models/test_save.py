"""The written folder of a model takes its place."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from pipeline.models.save import gathered_blocks, take_place, written_whole
from tests.weights.model import Model


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


def test_parameters_are_saved_in_another_type_and_buffers_in_their_own() -> None:
    model = Model()
    blocks = list(gathered_blocks(model, True, torch.bfloat16))
    found, wanted = {name: tensor for block in blocks for name, tensor in block.items()}, model.state(torch.bfloat16)
    assert list(found) == list(wanted) and "frequencies" not in found
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
    assert list(gathered_blocks(model, False, torch.bfloat16)) == [{}]
