"""Which checkpoint of a run is meant: the newest, that of an iteration, or the best by a metric."""

import atexit
import difflib
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.fs as pafs

from pipeline import checkpoints
from pipeline.config import Config, load_yaml
from pipeline.run_folder import CONFIG_FILE
from pipeline.storage import filesystem_of
from pipeline.track.history import read_history

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    path: Path
    iteration: int
    run_dir: Path
    """Folder of its run; its own where it lies outside of one."""
    mlflow_run_id: str | None
    """Of the run that MLflow tracked."""

    def config(self) -> Config:
        """Settings of the run when it was saved."""
        return load_yaml(self.path / CONFIG_FILE, Config)

    def metrics(self) -> dict[int, dict]:
        """Metrics of the run by iteration."""
        return {record["iteration"]: record for record in read_history(self.run_dir / METRICS)}


def is_run(path: Path) -> bool:
    """Whether `path` is the folder of a run or of a checkpoint."""
    return (path / CONFIG_FILE).is_file() or (path / checkpoints.PROGRESS).is_file()


def choose(
    path: Path, iteration: int | None = None, best: str | None = None, lowest: bool = False
) -> tuple[Checkpoint, list[str]]:
    """The checkpoint that is meant.

    Args:
        path: folder of a run or of a checkpoint.
        iteration: the run's checkpoint of this iteration.
        best: the one whose iteration has the highest value of this metric in the run's `metrics.jsonl`, the earliest
            of equally good ones.
        lowest: take the lowest value instead.

    Returns:
        the checkpoint, and sentences about those that were passed over because they are not whole.

    Raises:
        ValueError: there is none, it is not whole, or the metric was not measured at any.
    """
    path = path.absolute()
    if not is_run(path):
        what = "is neither a run's folder nor a checkpoint's" if path.is_dir() else "is not a folder"
        raise ValueError(f"{path} {what}; give a run's folder, such as runs/NAME, or one of its checkpoints")
    if iteration is not None and best is not None:
        raise ValueError("--iteration and --best both say which checkpoint; give one of them")
    if (path / checkpoints.PROGRESS).is_file():
        if iteration is not None or best is not None:
            raise ValueError(f"{path} is one checkpoint; leave out --iteration and --best, or give the run's folder")
        found = _read(str(path), path.parent.parent)
        if found is None:
            raise ValueError(f"the checkpoint {path} is not whole: saving it was broken off; give another")
        return found, []
    root = checkpoints.root(load_yaml(path / CONFIG_FILE, Config).trainer, path)
    known = checkpoints.iterations(root)
    if not known:
        raise ValueError(
            f"{root} has no checkpoints; a run saves them every trainer.save_freq iterations and at its end"
        )
    if iteration is not None:
        if iteration not in known:
            raise ValueError(f"{path} has no checkpoint of iteration {iteration}; those there are of {_listed(known)}")
        order = [iteration]
    else:
        order = _by_metric(path, known, best, lowest) if best else known[::-1]
    notes: list[str] = []
    for candidate in order:
        found = _read(f"{root}/{checkpoints.FOLDER}/{checkpoints.folder_name(candidate)}", path)
        if found is not None:
            return found, notes
        notes.append(f"iteration {candidate} is passed over: saving its checkpoint was broken off")
    raise ValueError(f"{path} has no whole checkpoint of iteration {_listed(order)}: saving was broken off")


def _read(place: str, run_dir: Path) -> Checkpoint | None:
    """The checkpoint in the folder or URL `place`, of the run in `run_dir` if that is one; None if it is not whole."""
    saved = checkpoints.read(place)
    if saved is None:
        return None
    path = _here(place)
    if not (run_dir / CONFIG_FILE).is_file():
        run_dir = path
    return Checkpoint(path, saved.iteration, run_dir, saved.progress.get("mlflow_run_id"))


def _here(place: str) -> Path:
    """A checkpoint as a folder of this machine; one behind a URL is copied, for as long as this process lives."""
    filesystem, path = filesystem_of(place)
    if isinstance(filesystem, pafs.LocalFileSystem):
        return Path(path)
    folder = tempfile.mkdtemp(prefix="slipstream-checkpoint-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pafs.copy_files(path, folder, source_filesystem=filesystem)
    return Path(folder)


def _by_metric(run_dir: Path, known: list[int], metric: str, lowest: bool) -> list[int]:
    """Iterations with a checkpoint and a value of `metric`, the best first."""
    records = read_history(run_dir / METRICS)
    if not any(metric in record for record in records):
        names = sorted({name for record in records for name in record if name.startswith("val-core/")})
        near = difflib.get_close_matches(metric, {name for record in records for name in record}, n=1)
        hint = f"did you mean {near[0]}?" if near else f"validation metrics there: {', '.join(names) or 'none'}"
        raise ValueError(f"{run_dir}/{METRICS} has no metric {metric!r}; {hint}")
    values = {record["iteration"]: record[metric] for record in records if record.get(metric) is not None}
    measured = [iteration for iteration in known if iteration in values]
    if not measured:
        raise ValueError(
            f"{metric} was measured at iterations {_listed(values)}, and checkpoints are of {_listed(known)}: none has "
            "both; choose with --iteration, and let trainer.save_freq be a multiple of trainer.test_freq"
        )
    return sorted(measured, key=lambda iteration: (values[iteration] * (1 if lowest else -1), iteration))


def _listed(iterations: Iterable[int]) -> str:
    numbers = [str(iteration) for iteration in iterations]
    return ", ".join(numbers if len(numbers) <= 12 else [*numbers[:5], "...", *numbers[-5:]])
