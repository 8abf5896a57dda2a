"""Determines what a supervised run in its folder `out` begins with: the model, or its own newest checkpoint.

`out` has the model and the records of the run that trained it. While it holds `config.yaml` and no `config.json`, the
run is unfinished, and the same settings continue it with the same files.
"""

from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config import ConfigError
from pipeline.config.supervised import SupervisedConfig
from pipeline.config.trainer import FILES
from pipeline.run.inputs import supervised_fingerprints
from pipeline.storage.checkpoints import Saved, newest
from pipeline.storage.fingerprints import Fingerprints, load
from pipeline.storage.resume import CONFIG_FILE, check_run_folder

KEYS = ("out", "out")
"""Settings that name the folder of a run, and the folder of all runs."""


@dataclass
class Beginning:
    """The checkpoint and the files with which a supervised run begins."""

    exists: bool
    """True if `out` already holds this run."""
    saved: Saved | None
    """The run's newest complete checkpoint; None if there is none."""
    kept: Fingerprints
    """Fingerprints to store in `out`."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user on checkpoints, each a sentence."""

    @property
    def done(self) -> int:
        """Number of steps that the run has done."""
        return self.saved.iteration if self.saved else 0


def beginning(out: Path, config: SupervisedConfig) -> Beginning:
    """Determine what the run in `out` begins with. Nothing is written.

    Args:
        out: the folder, which need not exist.
        config: the settings; local paths are absolute.

    Raises:
        ConfigError: `out` holds a finished run, a run with other settings or files, or other files.
        ValueError, OSError: all checkpoints are damaged, or a file cannot be read.
    """
    if (out / CONFIG_FILE).is_file() and (out / "config.json").is_file():
        raise ConfigError(f"{out} holds a finished run and its model; choose another out or delete {out}")
    exists = check_run_folder(out, config, config.trainer.resume, KEYS)
    notes: list[str] = []
    saved = newest(str(out), notes.append)
    now, known = supervised_fingerprints(config), load(str(out))
    if saved is None:
        if exists:
            notes.append(f"the run in {out} has no checkpoint and begins again")
        return Beginning(exists, None, now, notes)
    known = known or now
    changes = [f"{key}: {text}" for kind in FILES for key, text in known.changes(now, kind).items()]
    if changes:
        raise ConfigError(
            f"the run in {out} began on {known.began} with other files: {'; '.join(changes)}; put the files back, or "
            "choose another out"
        )
    notes.append(f"continuing after step {saved.iteration}, from {saved.place}")
    return Beginning(exists, saved, known, notes)
