"""The checkpoints of a run as files, without torch or Ray: which are whole, which is the newest, which are kept.

    runs/NAME/checkpoints/iteration_000020/   shards of all ranks, progress.json, complete_0 ... complete_{ranks - 1}

With `trainer.storage_path` they are in `STORAGE_PATH/NAME/checkpoints`. Each rank copies its files and then an empty
`complete_RANK`. A checkpoint is whole when all of these are there (`progress.json` says how many). One that is not
whole is never read, and is deleted when the next one is whole.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.fs as pafs

from pipeline.storage.filesystem import filesystem_of

if TYPE_CHECKING:
    from pipeline.config.trainer import TrainerConfig

FOLDER = "checkpoints"
PROGRESS = "progress.json"
NAME = re.compile(r"iteration_(?a:\d{6}|[1-9]\d{6,})")
"""Names that `folder_name` makes."""
LIST = "checkpoint_manager_snapshot.json"
"""Ray Train's own list of checkpoints."""


def root(trainer: "TrainerConfig", run_dir: str | Path) -> str:
    """Folder or URL in which the run's folder `checkpoints` lies."""
    if trainer.storage_path is None:
        return str(run_dir)
    return f"{trainer.storage_path.rstrip('/')}/{trainer.experiment_name}"


def folder_name(iteration: int) -> str:
    return f"iteration_{iteration:06d}"


def complete_name(rank: int) -> str:
    """Name of the last file that a rank writes."""
    return f"complete_{rank}"


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint."""

    iteration: int
    place: str
    progress: dict[str, Any]
    """As `train/checkpoint.py` writes it: version, cursor, kl_coef, world_size, ..."""


def read(place: str) -> Saved | None:
    """The checkpoint in the folder or URL `place`; None where there is none or not all of it.

    Raises:
        OSError: the storage does not answer.
        ValueError: the file system is unknown, or `progress.json` is damaged.
    """
    filesystem, path = filesystem_of(place)
    if filesystem.get_file_info(f"{path}/{PROGRESS}").type != pafs.FileType.File:
        return None
    with filesystem.open_input_stream(f"{path}/{PROGRESS}") as stream:
        content = stream.read()
    try:
        progress = json.loads(content)
        ranks = int(progress["world_size"])
        iteration = int(progress["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place}/{PROGRESS} is damaged ({error}); delete that checkpoint to use another") from error
    marks = filesystem.get_file_info([f"{path}/{complete_name(rank)}" for rank in range(ranks)])
    if any(mark.type != pafs.FileType.File for mark in marks):
        return None
    return Saved(iteration, place, progress)


def iterations(run_dir: str) -> list[int]:
    """Iterations of all checkpoints in `run_dir`, whole or not, in order."""
    filesystem, root = filesystem_of(run_dir)
    selector = pafs.FileSelector(f"{root}/{FOLDER}", allow_not_found=True)
    names = [info.base_name for info in filesystem.get_file_info(selector) if info.type == pafs.FileType.Directory]
    # Others may keep folders of similar names here.
    return sorted(int(name[len("iteration_") :]) for name in names if NAME.fullmatch(name))


def newest(run_dir: str) -> Saved | None:
    """The newest whole checkpoint in `run_dir`, a folder or URL; None without one."""
    for iteration in reversed(iterations(run_dir)):
        if (saved := read(f"{run_dir}/{FOLDER}/{folder_name(iteration)}")) is not None:
            return saved
    return None


def find(place: str) -> Saved:
    """The checkpoint that `trainer.resume=PLACE` names: a checkpoint's folder, or a run's, whose newest one it is.

    Raises:
        ValueError: there is no whole checkpoint.
    """
    place = place.rstrip("/")
    found = read(place) or newest(place)
    if found is None:
        raise ValueError(
            f"{place} holds no whole checkpoint; give the folder of one (runs/NAME/{FOLDER}/iteration_NNNNNN) or of a "
            "run that has one. A saved model is the model.path of a new run"
        )
    return found


def retain(run_dir: str, last: int, keep: int, spare: Collection[int] = ()) -> list[int]:
    """Delete old and incomplete checkpoints up to iteration `last`; the iterations whose were deleted.

    Args:
        run_dir: the run's folder or URL.
        last: the newest checkpoint that is known to be whole.
        keep: newest whole checkpoints that stay.
        spare: iterations whose checkpoints stay whatever their age.
    """
    filesystem, root = filesystem_of(run_dir)
    found = [number for number in iterations(run_dir) if number <= last]
    whole = [number for number in found if read(f"{run_dir}/{FOLDER}/{folder_name(number)}") is not None]
    stay = {*whole[-keep:], *spare}
    gone = [number for number in found if number not in stay]
    for number in gone:
        filesystem.delete_dir(f"{root}/{FOLDER}/{folder_name(number)}")
    return gone


def forget_list(run_dir: str) -> None:
    """Remove Ray Train's list of the checkpoints in `run_dir`.

    Raises:
        OSError: the storage does not answer.
    """
    filesystem, path = filesystem_of(run_dir)
    path = f"{path}/{FOLDER}/{LIST}"
    if filesystem.get_file_info(path).type == pafs.FileType.File:
        filesystem.delete_file(path)
