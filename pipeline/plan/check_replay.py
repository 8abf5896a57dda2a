"""Settings of a replay, a run that trains on the recorded rows of another (`data.recorded_run`).

Everything after the rollout stage runs as in any other run. Of what comes before it, only what the rows depend on is
left: how many there are to a prompt, how long they may be, and how they were sampled. Importing this loads neither
torch nor Ray nor vLLM.
"""

import copy
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from pipeline.config import Config, ConfigError, diff, load_yaml
from pipeline.config.schema import keys, value_of
from pipeline.derived import uses_baselines, uses_engines
from pipeline.prompts.recording import iteration_range
from pipeline.storage.run_folder import CONFIG_FILE, may_differ
from pipeline.train.correction import parse

REPLAY_CPUS = 0.1
"""Ray CPUs of the stage that reads recorded responses, which mostly waits."""

_READ = (
    *(f"data.{key}" for key in ("train_batch_size", "max_prompt_length", "max_response_length", "recorded_*")),
    *(f"rollout.{key}" for key in ("n", "temperature", "top_p", "top_k", "chunk_prompts", "dtype")),
)
"""Keys of `data` and `rollout` that a replay reads."""

UNREAD = tuple(
    name
    for name in keys(Config)
    if name.startswith(("data.", "rollout.", "stream.")) and not any(fnmatch(name, r) for r in _READ)
)
"""Keys that say how prompts are read and responses generated, which a replay does not do."""

OF_THE_RECORDING = ("rollout.n", "rollout.temperature", "rollout.top_p", "rollout.top_k")
"""Keys that say how the recorded responses were sampled."""
LENGTHS = ("data.max_prompt_length", "data.max_response_length")


def recorded_config(run_dir: Path) -> Config:
    """The settings of the run that was recorded in `run_dir`.

    Raises:
        ConfigError: it is no folder of a run, or that of another version.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"there is no folder {run_dir}; give that of a run that has trained, such as runs/NAME")
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"{run_dir} holds no {CONFIG_FILE}, so it is not the folder of a run, which runs/NAME is")
    try:
        return load_yaml(run_dir / CONFIG_FILE, Config)
    except ConfigError as error:
        raise ConfigError(f"the run in {run_dir} cannot be replayed by this version: {error}") from error


def replay_of(recorded: Config, run_dir: Path, iterations: str) -> Config:
    """The settings of a replay that changes nothing: those of the run that was recorded, where they mean something.

    It passes once over the rows, in the folder beside the recording's. The gap between engine and trainer is not
    guarded: as soon as a replay does anything else than the recorded run, the gap is no error.

    Args:
        recorded: settings of the run that was recorded.
        run_dir: its folder.
        iterations: which of them, as `data.recorded_iterations`.
    """
    config, default = copy.deepcopy(recorded), Config()
    for name in (*UNREAD, "trainer.val_before_train", "trainer.test_freq", "trainer.resume"):
        _set(config, name, value_of(default, name))
    folder, trainer = run_dir.resolve(), config.trainer
    config.data.recorded_run, config.data.recorded_iterations = str(folder), iterations
    trainer.experiment_name, trainer.default_local_dir = f"{folder.name}-replay", str(folder.parent)
    trainer.total_epochs, trainer.total_training_steps = 1, None
    trainer.max_log_prob_gap = None
    # Those that agreed are not in the recording.
    config.algorithm.filter_groups.enable = False
    return config


def _set(config: Config, name: str, value: object) -> None:
    section, _, last = name.rpartition(".")
    setattr(value_of(config, section), last, value)


def check_folder(config: Config, run_dir: Path) -> None:
    """Keep a replay out of the folder that it reads.

    Raises:
        ConfigError: `run_dir`, the folder of the run that is about to start, is that of the recording.
    """
    recorded = config.data.recorded_run
    if recorded is not None and run_dir.resolve() == Path(recorded).resolve():
        raise ConfigError(
            f"trainer.experiment_name={config.trainer.experiment_name} is the folder of the recording, {recorded}, "
            "whose rows the replay would replace; choose another name"
        )


def problems(config: Config) -> Iterator[str]:
    """One sentence per setting that cannot be with, or without, a recording. Part of `checks.check`."""
    data, trainer = config.data, config.trainer
    if data.recorded_run is None:
        if data.recorded_iterations is not None:
            yield (
                f"data.recorded_iterations={data.recorded_iterations} does nothing without data.recorded_run; "
                "python -m jobs.replay sets both"
            )
        return
    if data.recorded_iterations is not None:
        try:
            iteration_range(data.recorded_iterations)
        except ValueError as error:
            yield str(error)
    for name, files in (("train_files", data.train_files), ("generator", data.generator)):
        if files:
            yield (
                f"data.{name} does nothing with data.recorded_run={data.recorded_run}, whose prompts are those of the "
                "recording; leave one of them out"
            )
    if data.val_files or trainer.test_freq > 0:
        yield (
            f"data.recorded_run={data.recorded_run}: a replay starts no engine, so it cannot validate; leave out "
            "data.val_files and trainer.test_freq, and evaluate the model it saves with python -m jobs.evaluate"
        )


def mismatches(config: Config, recorded: Config) -> Iterator[str]:
    """One sentence per setting that the rows of the recording do not allow.

    Args:
        config: settings of the replay.
        recorded: settings of the run that was recorded.
    """
    for name in OF_THE_RECORDING:
        was, now = value_of(recorded, name), value_of(config, name)
        if was != now:
            yield (
                f"{name}={now}: the responses of {config.data.recorded_run} were sampled with {name}={was}, and a "
                "replay samples none; leave it as it was"
            )
    for name in LENGTHS:
        was, now = value_of(recorded, name), value_of(config, name)
        if now < was:
            yield f"{name}={now}: rows of {config.data.recorded_run} may have {was} tokens; leave it so or raise it"
    if not uses_baselines(config):
        return
    estimator = f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
    if not uses_baselines(recorded):
        yield (
            f"{estimator} reads the score of a greedy response to each prompt; {config.data.recorded_run} recorded "
            f"none (its estimator is {recorded.algorithm.adv_estimator}), and a replay generates none; choose another "
            "estimator"
        )
    for name, was, now in diff(recorded, config):
        if name.startswith(("reward.", "scoring.reward_model.")) and not may_differ(name):
            yield (
                f"{name}={now}: {estimator} compares with the recorded scores of greedy responses, whose text is not "
                f"recorded, so the reward must be that of the recording ({was}); leave it, or choose another estimator"
            )


def notes(config: Config) -> Iterator[str]:
    """What to know of a replay that is about to begin; nothing for another run. Part of `notes.notes`."""
    if uses_engines(config):
        return
    yield (
        "a replay starts no engine: nothing is validated, and data.val_files and trainer.test_freq are left out; the "
        "model it saves is one for python -m jobs.evaluate"
    )
    gap, correction = config.trainer.max_log_prob_gap, config.algorithm.rollout_correction
    if gap is not None:
        yield (
            f"trainer.max_log_prob_gap={gap:g} ends the replay in the iteration in which its policy first differs that "
            "much from the one that was recorded"
        )
    if config.actor.old_log_probs != "recompute" or not parse(correction).active:
        yield (
            "the log-probs in the rows are those of the recorded policy; once the replay's policy has parted from it, "
            "training is off-policy. actor.old_log_probs=recompute with algorithm.rollout_correction (as in "
            "algorithm=[NAME,tis]) weighs rows by how far they are off; see docs/replay.md"
        )
