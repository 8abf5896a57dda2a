"""The written folder of a model takes its place."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from pipeline.models.save import gathered_blocks, join, readable, take_place, written_whole
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
    blocks = list(gathered_blocks(model, torch.bfloat16))
    found, wanted = {name: tensor for block in blocks for name, tensor in block.items()}, model.state(torch.bfloat16)
    assert list(found) == list(wanted) and "frequencies" not in found
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name


def test_a_model_joins_other_files_and_replaces_remains(tmp_path: Path) -> None:
    partial, folder = tmp_path / "partial", tmp_path / "out"
    for place in (partial, folder):
        (place / "adapter").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "adapter/new"):
        (partial / name).write_text("new")
    for name in ("metrics.jsonl", "model.safetensors", "adapter/old"):
        (folder / name).write_text("old")
    join(partial, folder)
    there = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    kept = {"metrics.jsonl": "old"}
    assert there == kept | dict.fromkeys(("config.json", "model.safetensors", "adapter/new"), "new")
    assert not partial.exists()


def test_a_model_is_whole_with_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, folder = tmp_path / "partial", tmp_path / "out"
    partial.mkdir()
    for name in ("config.json", "a", "z"):
        (partial / name).touch()
    moved: list[str] = []
    move = shutil.move
    monkeypatch.setattr(shutil, "move", lambda path, target: (moved.append(path.name), move(path, target)))
    join(partial, folder)
    assert sorted(moved[:2]) == ["a", "z"] and moved[2] == "config.json"
    partial.mkdir()
    with pytest.raises(OSError, match="it holds a model"):
        join(partial, folder)


def test_weights_get_the_mode_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    files = [tmp_path / "model.safetensors", tmp_path / "adapter" / "adapter_model.safetensors"]
    for file in files:
        file.touch(0o600)
    old = os.umask(0o027)
    try:
        readable(tmp_path)
    finally:
        os.umask(old)
    assert [file.stat().st_mode & 0o777 for file in files] == [0o640, 0o640]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "model.safetensors"]
