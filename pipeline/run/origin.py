"""Determines what a run begins with: its model, its own newest checkpoint, or the policy of another run.

A run continues only with the files with which it began (`fingerprints.json`), unless `trainer.accept_changed` names
their kind.
"""

from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config import Config, ConfigError, load_yaml
from pipeline.config.places import NO_PATH
from pipeline.config.schema import value_of
from pipeline.config.trainer import FILES
from pipeline.derived import reads_reference, reference_is_base, uses_critic
from pipeline.run.inputs import fingerprints
from pipeline.storage import resume
from pipeline.storage.checkpoints import Saved
from pipeline.storage.fingerprints import Fingerprints, load

UNKNOWN = (
    "{place} was begun by a version without fingerprints, so changes of model, prompts and code since then are not "
    "known; fingerprints are kept from now on"
)


@dataclass
class Origin:
    """The checkpoint, the policy and the files with which a run begins."""

    exists: bool
    """True if the run's folder already holds this run."""
    own: Saved | None = None
    """The run's newest complete checkpoint, from which the run continues; None if there is none."""
    policy: Saved | None = None
    """The checkpoint of another run, from which the run takes the weights; None if there is none."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user on checkpoints and files, each a sentence."""
    kept: Fingerprints | None = None
    """Fingerprints of a run that continues; None for a new run."""

    def fingerprints(self, config: Config) -> Fingerprints:
        """Return the fingerprints to store in the run's folder from now on."""
        return self.kept or fingerprints(config)


def origin(run_dir: Path, config: Config) -> Origin:
    """Determine what the run in `run_dir` begins with. Nothing is written.

    Args:
        run_dir: the run's folder, which need not exist.
        config: the settings; local paths are absolute.

    Raises:
        ConfigError: the folder holds another run, its files have changed, or `trainer.resume` names no usable policy.
        ValueError, OSError: a checkpoint is damaged, or a file cannot be read.
    """
    made = Origin(resume.check_run_folder(run_dir, config, config.trainer.resume))
    made.own = resume.own_checkpoint(run_dir, config, made.notes.append)
    if made.own is None:
        made.policy = resume.given_policy(config, made.notes.append)
    elif config.trainer.resume not in NO_PATH:
        made.notes.append(
            f"trainer.resume={config.trainer.resume} is ignored: the run continues from its own checkpoint, after "
            f"iteration {made.own.iteration}; choose another trainer.experiment_name to begin a new run"
        )
    if made.own is not None:
        _go_on(made, made.own, run_dir, config)
    elif made.policy is not None:
        _begin_with(made, made.policy, config)
    if made.own is None and made.exists:
        _begin_again(made, run_dir, config)
    return made


def _begin_again(made: Origin, run_dir: Path, config: Config) -> None:
    """Add notes on what differs for a run without a checkpoint, which begins again."""
    known, resumed = load(str(run_dir)), load_yaml(run_dir / resume.CONFIG_FILE, Config).trainer.resume
    if changes := _listed(_changes(known, fingerprints(config))) if known else []:
        made.notes.append(f"the run has no checkpoint and begins again, with other files: {'; '.join(changes)}")
    if resumed not in NO_PATH and made.policy is None:
        made.notes.append(
            f"the run has no checkpoint and begins again with model.path={config.model.path}; it began with the policy "
            f"in {resumed}, which trainer.resume={resumed} takes"
        )


def _go_on(made: Origin, own: Saved, run_dir: Path, config: Config) -> None:
    """Compare the files of a run that continues with the files at its beginning; set `made.kept` and add notes.

    Raises:
        ConfigError: files have changed, and `trainer.accept_changed` does not name their kind.
    """
    known = load(str(run_dir)) or load(own.place)
    if known is None:
        made.notes.append(UNKNOWN.format(place=run_dir))
        return
    now = fingerprints(config)
    changes = _changes(known, now)
    stored = resume.stored_config(own) if not made.exists else load_yaml(run_dir / resume.CONFIG_FILE, Config)
    if stored.data.val_files != config.data.val_files and (other := changes["prompts"].pop("data.val_files", None)):
        # The setting `data.val_files` may name other files.
        made.notes.append(f"data.val_files names other files ({other}): validations before and after do not compare")
    accepted = set(config.trainer.accept_changed)
    refused = {kind: found for kind, found in changes.items() if found and kind not in accepted}
    if refused:
        named = ",".join(kind for kind in FILES if kind in refused or kind in accepted)
        lines = [
            f"the run in {run_dir} began on {known.began} with other files:",
            *(f"- {line}" for line in _listed(refused)),
            f"trainer.accept_changed=[{named}] continues it with the files as they are now; another "
            "trainer.experiment_name begins a new run",
        ]
        raise ConfigError("\n".join(lines))
    for kind in accepted:
        if changes[kind]:
            made.notes.append(f"trainer.accept_changed: {'; '.join(_listed({kind: changes[kind]}))}")
        else:
            made.notes.append(f"trainer.accept_changed={kind} has no effect: no file of that kind has changed")
    if changes["prompts"].keys() & {"data.train_files"}:
        cursor = own.progress["cursor"]
        made.notes.append(
            f"the place in the prompts is kept: epoch {cursor.get('epoch', 0)}, after prompt {cursor.get('offset', 0)}"
        )
    found = {setting: text for kind in FILES for setting, text in changes[kind].items()}
    made.kept = known.continued(now, own.iteration, found)


def _begin_with(made: Origin, policy: Saved, config: Config) -> None:
    """Add notes on what a new run takes from another run's checkpoint.

    Raises:
        ConfigError: the checkpoint's weights belong to another base model.
    """
    known = load(policy.place)
    if known is not None and "model" not in config.trainer.accept_changed:
        bases = {key: known.model[key] for key in resume.BASES if key in known.model and value_of(config, key)}
        changed = Fingerprints(bases).changes(fingerprints(config), "model")
        if changed:
            listed = "; ".join(_listed({"model": changed}))
            raise ConfigError(
                f"trainer.resume={policy.place} has weights of another model: {listed}; give the model of that run, or "
                "trainer.accept_changed=[model] if its weights fit"
            )
    taken = policy.progress["scheduler_steps"]
    critic = uses_critic(config)
    text = (
        f"a new run with the policy of iteration {policy.iteration} in {policy.place}: it takes the weights of the "
        f"actor{' and the critic' if critic and 'critic' in taken else ''}; optimiser, learning rate, KL coefficient, "
        "data and iterations begin from the start"
    )
    if critic and "critic" not in taken:
        text += f"; the critic begins as {config.critic.path or config.model.path}, since that run had none"
    made.notes.append(text)
    if reads_reference(config):
        base = "the model without adapters" if reference_is_base(config) else None
        path = config.scoring.reference.path
        named = f"scoring.reference.path={path}" if path else f"model.path={config.model.path}"
        made.notes.append(
            f"the KL is against {base or named}, not against that policy; scoring.reference.path=RUN/model would be"
        )


def _changes(known: Fingerprints, now: Fingerprints) -> dict[str, dict[str, str]]:
    return {kind: known.changes(now, kind) for kind in FILES}


def _listed(changes: dict[str, dict[str, str]]) -> list[str]:
    return [f"{setting}: {text}" for found in changes.values() for setting, text in found.items()]
