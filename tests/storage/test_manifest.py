"""Lengths and checksums of a checkpoint's files."""

import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow.fs as pafs
import pytest

from pipeline.storage import checkpoints
from pipeline.storage.checkpoints import Damaged, find, iterations, newest, read, retain, set_aside
from pipeline.storage.filesystem import move_folder
from pipeline.storage.manifest import listed, parse, wrong_content, wrong_length
from tests.storage.test_checkpoints import written

RANKS = 2


def whole(run_dir: Path, iteration: int) -> Path:
    """A checkpoint of two ranks, each with a shard, as they write it."""
    folder = written(run_dir, iteration, RANKS)
    (folder / "config.yaml").write_text("a: 1")
    own: dict[int, Path] = {}
    for rank in range(RANKS):
        own[rank] = run_dir / f"rank_{rank}"
        own[rank].mkdir()
        (own[rank] / f"__{rank}_0.distcp").write_bytes(bytes([iteration, rank]) * 3_000_000)
        if rank == 0:
            shutil.copy(folder / "progress.json", own[rank])
        shutil.copytree(own[rank], folder, dirs_exist_ok=True)
        (folder / f"complete_{rank}").write_text(listed(own[rank]))
        shutil.rmtree(own[rank])
    return folder


def cut(folder: Path) -> None:
    with (folder / "__1_0.distcp").open("r+b") as file:
        file.truncate(3_000_000)


def flipped(folder: Path) -> None:
    with (folder / "__1_0.distcp").open("r+b") as file:
        file.seek(4_000_000)
        file.write(b"\xff")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (cut, "__1_0.distcp has 3,000,000 of 6,000,000 bytes"),
    "longer": (lambda f: (f / "__0_0.distcp").open("ab").write(b"x"), "__0_0.distcp has 6,000,001 of 6,000,000 bytes"),
    "missing": (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "empty": (lambda f: (f / "__0_0.distcp").write_bytes(b""), "__0_0.distcp has 0 of 6,000,000 bytes"),
    "a folder": (lambda f: ((f / "__0_0.distcp").unlink(), (f / "__0_0.distcp").mkdir()), "__0_0.distcp is missing"),
    "no progress": (lambda f: (f / "progress.json").unlink(), "progress.json is missing"),
    "empty progress": (lambda f: (f / "progress.json").write_text(""), "progress.json cannot be read"),
    "other progress": (lambda f: (f / "progress.json").write_text("[]"), "progress.json cannot be read"),
    "bytes in progress": (lambda f: (f / "progress.json").write_bytes(b"\xff\xfe"), "progress.json cannot be read"),
    "torn list": (lambda f: (f / "complete_1").write_text('{"a'), "its list of files cannot be read"),
    "list of others": (lambda f: (f / "complete_1").write_text("[1]"), "its list of files cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(tmp_path: Path, name: str) -> None:
    damage, problem = DAMAGE[name]
    before, last = whole(tmp_path, 2), whole(tmp_path, 4)
    assert newest(str(tmp_path)).iteration == 4  # type: ignore[union-attr]
    damage(last)
    with pytest.raises(Damaged) as error:
        read(str(last))
    assert str(error.value).startswith(f"the checkpoint {last} is damaged: {problem}") and error.value.place == str(
        last
    )
    for url in (str(tmp_path), f"file://{tmp_path}"):
        said: list[str] = []
        found = find(url, said.append)
        assert found.iteration == 2 and len(said) == 1
        assert problem in said[0] and said[0].endswith(f"; {found.place} is taken")
    with pytest.raises(Damaged, match="is damaged"):
        find(str(last))
    damage(before)
    with pytest.raises(ValueError, match=r"04 is damaged: .*02 is damaged: .*No earlier checkpoint is complete; put"):
        newest(str(tmp_path))


def test_other_content_of_the_same_length_is_found_by_the_ranks_that_read_it(tmp_path: Path) -> None:
    folder = whole(tmp_path, 4)
    files = read(str(folder)).files  # type: ignore[union-attr]
    assert sorted(files) == ["__0_0.distcp", "__1_0.distcp", "progress.json"]
    assert all(wrong_content(folder, files, part, 2) is None for part in (0, 1))
    flipped(folder)
    assert wrong_content(folder, files) == "__1_0.distcp has another content than was written"
    assert [wrong_content(folder, files, part, 2) is None for part in (0, 1)] == [True, False]
    shutil.copy(whole(tmp_path, 6) / "__1_0.distcp", folder)
    assert wrong_content(folder, files) == "__1_0.distcp has another content than was written"
    assert wrong_length(pafs.LocalFileSystem(), str(folder), files) is None


def test_settings_may_be_changed_and_older_checkpoints_listed_nothing(tmp_path: Path) -> None:
    folder = whole(tmp_path, 4)
    (folder / "config.yaml").write_text("b: 22")
    assert read(str(folder)) is not None
    older = written(tmp_path, 6)
    assert read(str(older)).files == {} == parse("")  # type: ignore[union-attr]


def test_a_damaged_checkpoint_is_never_deleted_and_is_no_newest(tmp_path: Path) -> None:
    for iteration in (2, 4, 6, 8):
        whole(tmp_path, iteration)
    cut(tmp_path / "checkpoints" / "iteration_000008")
    assert retain(str(tmp_path), 8, 1) == [2, 4] and iterations(str(tmp_path)) == [6, 8]


def test_a_damaged_checkpoint_is_kept_under_another_name(tmp_path: Path) -> None:
    for ending in ("damaged", "damaged-2"):
        folder = whole(tmp_path, 4)
        assert set_aside(f"file://{folder}") == f"file://{folder}.{ending}"
        assert not folder.exists() and (folder.parent / f"{folder.name}.{ending}" / "progress.json").is_file()
    assert iterations(str(tmp_path)) == []


def test_a_storage_that_cannot_rename_folders_copies_them(tmp_path: Path) -> None:
    class Unmoved(pafs.FSSpecHandler):
        def move(self, source: str, target: str) -> None:
            raise NotImplementedError

    filesystem = pafs.PyFileSystem(Unmoved(fsspec.filesystem("file")))
    source = tmp_path / "a"
    (source / "b").mkdir(parents=True)
    (source / "b" / "c").write_text("d")
    move_folder(filesystem, str(source), str(tmp_path / "e"))
    assert (tmp_path / "e" / "b" / "c").read_text() == "d" and not source.exists()


def test_a_deletion_that_is_interrupted_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = whole(tmp_path, 2)

    class Interrupted(pafs.LocalFileSystem):
        def delete_dir(self, path: str) -> None:
            raise OSError(5, "away")

    monkeypatch.setattr(checkpoints, "filesystem_of", lambda place: (Interrupted(), place))
    with pytest.raises(OSError, match="away"):
        checkpoints.delete(str(folder))
    (folder / "__0_0.distcp").unlink()
    monkeypatch.undo()
    assert read(str(folder)) is None
