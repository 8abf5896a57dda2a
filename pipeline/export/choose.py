"""The choice of a checkpoint in a run: the newest, the one of an iteration, or the best by a metric."""

import atexit
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.fs as pafs

from pipeline.config import Config, load_yaml
from pipeline.storage import checkpoints
from pipeline.storage.filesystem import filesystem_of
from pipeline.storage.manifest import wrong_content
from pipeline.storage.resume import CONFIG_FILE
from pipeline.track.history import read_history

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint in a local folder."""

    path: Path
    iteration: int
    run_dir: Path
    """Folder of the run; `path` if the checkpoint is outside of a run."""
    mlflow_run_id: str | None
    """Id of the MLflow run that tracked the training, or None."""

    def config(self) -> Config:
        """Load the settings that the run had when the checkpoint was saved."""
        return load_yaml(self.path / CONFIG_FILE, Config)

    def metrics(self) -> dict[int, dict]:
        """Read the run's metrics, by iteration."""
        return {record["iteration"]: record for record in read_history(self.run_dir / METRICS)}


def is_run(path: Path) -> bool:
    """Return whether `path` is the folder of a run or of a checkpoint."""
    return (path / CONFIG_FILE).is_file() or (path / checkpoints.PROGRESS).is_file()


def choose(
    path: Path, iteration: int | None = None, best: str | None = None, lowest: bool = False
) -> tuple[Checkpoint, list[str]]:
    """Choose a checkpoint of the run in `path`, by default the newest complete one.

    Args:
        path: folder of a run or of a checkpoint.
        iteration: take the checkpoint of this iteration.
        best: take the checkpoint with the highest value of this metric in `metrics.jsonl`, the earliest if several are
            equal.
        lowest: true to take the lowest value instead.

    Returns:
        The checkpoint, and a sentence for each one that was skipped because it is damaged or its saving was
        interrupted.

    Raises:
        ValueError: no checkpoint fits, it is incomplete or damaged, or no saved iteration has the metric.
        OSError: the storage of the checkpoints does not answer.
    """
    path = path.absolute()
    if not is_run(path):
        what = "is neither a run's folder nor a checkpoint's" if path.is_dir() else "is not a folder"
        raise ValueError(f"{path} {what}; give a run's folder, such as runs/NAME, or one of its checkpoints")
    if iteration is not None and best is not None:
        raise ValueError("--iteration and --best each choose a checkpoint; give one of them")
    if (path / checkpoints.PROGRESS).is_file():
        if iteration is not None or best is not None:
            raise ValueError(f"{path} is one checkpoint; leave out --iteration and --best, or give the run's folder")
        checkpoint = _open(str(path), path.parent.parent)
        if checkpoint is None:
            raise ValueError(f"the checkpoint {path} is incomplete: its saving was interrupted; give another one")
        return checkpoint, []
    root = checkpoints.root(load_yaml(path / CONFIG_FILE, Config).trainer, path)
    saved = checkpoints.iterations(root)
    if not saved:
        raise ValueError(
            f"{root} has no checkpoints; a run saves one every trainer.save_freq iterations and one at its end"
        )
    candidates = saved[::-1]
    if best is not None:
        candidates = _by_metric(path / METRICS, saved, best, lowest)
    elif iteration is not None:
        if iteration not in saved:
            raise ValueError(f"{path} has no checkpoint of iteration {iteration}, but of {_listed(saved)}")
        candidates = [iteration]
    notes: list[str] = []
    for number in candidates:
        try:
            checkpoint = _open(f"{root}/{checkpoints.FOLDER}/{checkpoints.folder_name(number)}", path)
        except checkpoints.Damaged as error:
            notes.append(f"the checkpoint of iteration {number} is skipped: {error}")
            continue
        if checkpoint is not None:
            return checkpoint, notes
        notes.append(f"the checkpoint of iteration {number} is skipped: its saving was interrupted")
    raise ValueError(f"{path} has no complete checkpoint of iteration {_listed(candidates)}: {'; '.join(notes)}")


def _open(place: str, run_dir: Path) -> Checkpoint | None:
    """Open the checkpoint at `place`, a folder or URL; a remote one is copied to a temporary folder.

    Returns None if the checkpoint is incomplete.

    Raises:
        Damaged: a file of the checkpoint is missing or has other content.
    """
    saved = checkpoints.read(place)
    if saved is None:
        return None
    filesystem, source = filesystem_of(place)
    path = Path(source)
    if not isinstance(filesystem, pafs.LocalFileSystem):
        path = Path(tempfile.mkdtemp(prefix="slipstream-checkpoint-"))
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        pafs.copy_files(source, str(path), source_filesystem=filesystem)
    if problem := wrong_content(path, saved.files):
        raise checkpoints.Damaged(place, problem)
    if not (run_dir / CONFIG_FILE).is_file():
        run_dir = path
    return Checkpoint(path, saved.iteration, run_dir, saved.progress.get("mlflow_run_id"))


def _by_metric(history: Path, saved: list[int], metric: str, lowest: bool) -> list[int]:
    """Return the iterations of `saved` that have a value of `metric`, the best first; with `lowest`, the lowest."""
    records = read_history(history)
    values = {record["iteration"]: record[metric] for record in records if record.get(metric) is not None}
    if not values:
        names = sorted({name for record in records for name in record if name.startswith("val-core/")})
        raise ValueError(
            f"{history} has no metric {metric!r}; its validation metrics are: {', '.join(names) or 'none'}"
        )
    measured = [iteration for iteration in saved if iteration in values]
    if not measured:
        raise ValueError(
            f"{metric} was measured at iterations {_listed(values)} and checkpoints were saved at {_listed(saved)}, "
            "never at the same one; choose with --iteration, and let trainer.save_freq be a multiple of "
            "trainer.test_freq"
        )
    return sorted(measured, key=lambda iteration: values[iteration] if lowest else -values[iteration])


def _listed(iterations: Iterable[int]) -> str:
    numbers = [str(iteration) for iteration in iterations]
    return ", ".join(numbers if len(numbers) <= 12 else [*numbers[:5], "...", *numbers[-5:]])
