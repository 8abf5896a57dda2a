"""The files of a run's checkpoints, without torch or Ray: which are complete, which is the newest, which are kept.

    runs/NAME/checkpoints/iteration_000020/   shards of all ranks, progress.json, complete_0 ... complete_{ranks - 1}

With `trainer.storage_path` they are in `STORAGE_PATH/NAME/checkpoints`. Each rank copies its files and then
`complete_RANK`, which lists them (`manifest.py`). A checkpoint is whole (complete) if all `complete_RANK` exist
(`progress.json` has the number of ranks). An incomplete checkpoint is never read, and is deleted as soon as the next
one is whole. A checkpoint with files that have changed since is damaged: the run goes on from the one before, and the
damaged one is kept as `iteration_NNNNNN.damaged`.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.fs as pafs

from pipeline.storage.filesystem import filesystem_of, move_folder
from pipeline.storage.manifest import Manifest, parse, wrong_length

if TYPE_CHECKING:
    from pipeline.config.trainer import TrainerConfig

FOLDER = "checkpoints"
PROGRESS = "progress.json"
NAME = re.compile(r"iteration_(?a:\d{6}|[1-9]\d{6,})")
"""Pattern of the names that `folder_name` makes."""
LIST = "checkpoint_manager_snapshot.json"
"""Name of Ray Train's own list of checkpoints."""


def root(trainer: "TrainerConfig", run_dir: str | Path) -> str:
    """Return the folder or URL that contains the run's folder `checkpoints`."""
    if trainer.storage_path is None:
        return str(run_dir)
    return f"{trainer.storage_path.rstrip('/')}/{trainer.experiment_name}"


def folder_name(iteration: int) -> str:
    return f"iteration_{iteration:06d}"


def complete_name(rank: int) -> str:
    """Return the name of the last file that a rank writes into a checkpoint; it marks the rank's part as complete."""
    return f"complete_{rank}"


class Damaged(ValueError):
    """A checkpoint differs from what was written. The message names the checkpoint and the file.

    Args:
        place: folder or URL of the checkpoint.
        problem: a clause on the damage.
    """

    def __init__(self, place: str, problem: str):
        super().__init__(place, problem)
        self.place, self.problem = place, problem

    def __str__(self) -> str:
        return f"the checkpoint {self.place} is damaged: {self.problem}"


@dataclass(frozen=True)
class Saved:
    """A whole (complete) checkpoint."""

    iteration: int
    place: str
    progress: dict[str, Any]
    """Content of `progress.json`, written by `train/checkpoint.py`: version, cursor, kl_coef, world_size, ..."""
    files: Manifest = field(default_factory=dict, repr=False, compare=False)
    """Manifest of the files of all ranks."""


def read(place: str) -> Saved | None:
    """Read the description of the checkpoint in the folder or URL `place`; None if there is none, or it is incomplete.

    Raises:
        OSError: the storage does not answer.
        Damaged: a file is missing or of another length, or `progress.json` cannot be read.
        ValueError: the file system is unknown.
    """
    filesystem, path = filesystem_of(place)
    if filesystem.get_file_info(f"{path}/{PROGRESS}").type != pafs.FileType.File:
        if filesystem.get_file_info(f"{path}/{complete_name(0)}").type == pafs.FileType.File:
            raise Damaged(place, f"{PROGRESS} is missing")
        return None
    try:
        progress = json.loads(_content(filesystem, f"{path}/{PROGRESS}"))
        ranks, iteration = int(progress["world_size"]), int(progress["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(place, f"{PROGRESS} cannot be read ({type(error).__name__}: {error})") from error
    names = [f"{path}/{complete_name(rank)}" for rank in range(ranks)]
    if any(mark.type != pafs.FileType.File for mark in filesystem.get_file_info(names)):
        return None
    files: dict[str, tuple[int, int]] = {}
    try:
        for name in names:
            files |= parse(_content(filesystem, name))
    except ValueError as error:
        raise Damaged(place, str(error)) from error
    if problem := wrong_length(filesystem, path, files):
        raise Damaged(place, problem)
    return Saved(iteration, place, progress, files)


def _content(filesystem: pafs.FileSystem, path: str) -> str:
    with filesystem.open_input_stream(path) as stream:
        return stream.read().decode("utf-8")


def iterations(run_dir: str) -> list[int]:
    """Return the iterations of all checkpoints in `run_dir`, complete or not, in ascending order."""
    filesystem, root = filesystem_of(run_dir)
    selector = pafs.FileSelector(f"{root}/{FOLDER}", allow_not_found=True)
    names = [info.base_name for info in filesystem.get_file_info(selector) if info.type == pafs.FileType.Directory]
    # Other programs may keep folders of similar names here.
    return sorted(int(name[len("iteration_") :]) for name in names if NAME.fullmatch(name))


def places(run_dir: str) -> list[str]:
    """Return the folders or URLs of all checkpoints in `run_dir`, complete or not, the newest first."""
    return [f"{run_dir}/{FOLDER}/{folder_name(iteration)}" for iteration in reversed(iterations(run_dir))]


def newest(run_dir: str, say: Callable[[str], None] = lambda text: None) -> Saved | None:
    """Return the newest complete checkpoint of a run; None if there is none.

    Args:
        run_dir: the run's folder or URL.
        say: function that gets a sentence for each newer checkpoint that is damaged.

    Raises:
        OSError: the storage does not answer.
        ValueError: all checkpoints are damaged.
    """
    problems: list[Damaged] = []
    for place in places(run_dir):
        try:
            saved = read(place)
        except Damaged as error:
            problems.append(error)
            continue
        if saved is not None:
            for problem in problems:
                say(f"{problem}; {saved.place} is taken")
            return saved
    if problems:
        raise ValueError(none_is_whole(problems))
    return None


def none_is_whole(problems: list[Damaged]) -> str:
    """Format the error message for a run with only damaged checkpoints."""
    return (
        f"{'; '.join(map(str, problems))}. No earlier checkpoint is complete; put back the files, or delete the "
        "damaged checkpoint to begin again"
    )


def find(place: str, say: Callable[[str], None] = lambda text: None) -> Saved:
    """Return the checkpoint that `trainer.resume=PLACE` names.

    Args:
        place: folder or URL of a checkpoint, or of a run, whose newest complete checkpoint is taken.
        say: function that gets a sentence for each newer checkpoint of the run that is damaged.

    Raises:
        ValueError: a complete checkpoint does not exist there.
    """
    place = place.rstrip("/")
    found = read(place) or newest(place, say)
    if found is None:
        raise ValueError(
            f"{place} has no complete checkpoint; give the folder of one (runs/NAME/{FOLDER}/iteration_NNNNNN) or of a "
            "run that has one. A saved model is the model.path of a new run"
        )
    return found


def set_aside(place: str) -> str:
    """Rename a damaged checkpoint, so that its name is free and nothing deletes it; returns the new folder or URL.

    Raises OSError if the storage cannot rename it.
    """
    filesystem, path = filesystem_of(place)
    for number in itertools.count(1):
        ending = ".damaged" if number == 1 else f".damaged-{number}"
        if filesystem.get_file_info(path + ending).type == pafs.FileType.NotFound:
            move_folder(filesystem, path, path + ending)
            return place + ending
    raise AssertionError


def retain(run_dir: str, last: int, keep: int, spare: Collection[int] = ()) -> list[int]:
    """Delete old and incomplete checkpoints up to iteration `last`, but no damaged ones.

    Args:
        run_dir: the run's folder or URL.
        last: iteration of the newest checkpoint that is known to be complete.
        keep: number of newest complete checkpoints that stay.
        spare: iterations of checkpoints that stay at any age.

    Returns:
        The iterations of the deleted checkpoints.
    """
    whole, incomplete = list[int](), list[int]()
    for number in iterations(run_dir):
        if number <= last:
            with contextlib.suppress(Damaged):
                saved = read(f"{run_dir}/{FOLDER}/{folder_name(number)}")
                (incomplete if saved is None else whole).append(number)
    gone = [number for number in sorted([*whole[: max(0, len(whole) - keep)], *incomplete]) if number not in spare]
    for number in gone:
        delete(f"{run_dir}/{FOLDER}/{folder_name(number)}")
    return gone


def delete(place: str) -> None:
    """Delete a checkpoint or its remains. An interrupted deletion leaves an incomplete checkpoint.

    Raises OSError if the storage cannot delete it.
    """
    filesystem, path = filesystem_of(place)
    if filesystem.get_file_info(mark := f"{path}/{complete_name(0)}").type == pafs.FileType.File:
        filesystem.delete_file(mark)
    if filesystem.get_file_info(path).type == pafs.FileType.Directory:
        filesystem.delete_dir(path)


def forget_list(run_dir: str) -> None:
    """Remove Ray Train's list of the checkpoints in `run_dir`.

    Raises:
        OSError: the storage does not answer.
    """
    filesystem, path = filesystem_of(run_dir)
    path = f"{path}/{FOLDER}/{LIST}"
    if filesystem.get_file_info(path).type == pafs.FileType.File:
        filesystem.delete_file(path)
