"""Checks, when a run is started, whether it may write into its folder, and from which checkpoint it continues.

A run that is started again with the same settings continues. Other settings would mix two experiments in one curve, so
they are refused, except for settings of length, reporting and layout (`MAY_DIFFER`). Settings that name files may name
other paths, because the files themselves are compared (`fingerprints.py`).
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config import Config, ConfigError, diff, load_yaml
from pipeline.config.places import NO_PATH
from pipeline.derived import uses_critic
from pipeline.models.settings import load_settings
from pipeline.storage import moved
from pipeline.storage.checkpoints import PROGRESS, Saved, find, iterations, newest, root
from pipeline.storage.filesystem import filesystem_of
from pipeline.storage.fingerprints import Fingerprints, load
from pipeline.storage.owner import FILE

CONFIG_FILE = "config.yaml"
BASES = ("model.path", "critic.path")
"""Settings that name the models to which a checkpoint's tensors belong."""
OF_THE_WEIGHTS = ("model.dtype", "model.lora.rank", "model.lora.alpha", "model.lora.target_modules")
"""Other settings that define a checkpoint's tensors."""

_SECTIONS = {
    "data": "val_files val_max_samples max_bad_rows",
    "rollout": "num_engines min_engines max_engines sleep chunks_in_flight num_cpus num_gpus tensor_parallel_size "
    "num_threads gpu_memory_utilization cpu_kvcache_space_gb max_num_seqs max_num_batched_tokens enforce_eager",
    "actor": "parallel.",
    "agent": "hosts min_hosts host_cpus",
    "reward": "num_cpus max_error_rate timeout_s max_processes worker_memory_mb rate_limit.",
    **dict.fromkeys(
        ("scoring.reward_model", "scoring.reference", "scoring.value", "scoring.policy"),
        "num_workers num_cpus num_gpus num_threads max_token_len",
    ),
    "scoring": "reference.placement reference.offload",
    "teacher": "url placement offload num_workers num_cpus num_gpus num_threads max_token_len timeout_s api_key_env",
    "trainer": "project_name experiment_name default_local_dir total_epochs total_training_steps cpus_per_worker "
    "num_threads ray_num_cpus object_store_gb val_before_train test_freq save_freq max_ckpt_to_keep best_metric "
    "best_metric_mode num_workers use_gpu gpus_per_worker resume accept_changed max_failures max_log_prob_gap "
    "handshake max_nonfinite_steps logger log_samples log_traces stream_gradients weight_bucket_mb weight_transport "
    "deadlines. env_vars placement",
}
MAY_DIFFER = tuple(f"{section}.{key}" for section, keys in _SECTIONS.items() for key in keys.split())
"""Settings that a continued run may change. A name that ends in a dot stands for all settings of its section."""
SUPERVISED_MAY_DIFFER = (
    *("out", "trainer.max_token_len_per_gpu", "trainer.logits_chunk_tokens"),
    *("trainer.data_timeout", "trainer.start_timeout"),
)
"""Further settings that a continued supervised run may change; an RL run does not have them."""
RUN_KEYS = ("trainer.experiment_name", "trainer.default_local_dir")
"""Settings that name a run's folder, and the folder of all runs."""


def check_writable(run_dir: Path, keys: tuple[str, str] = RUN_KEYS) -> None:
    """Raise ConfigError if the run's folder `run_dir`, which the settings `keys` name, cannot be created or written."""
    name, parent = keys
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(
            f"{run_dir} is a file, but the run needs a folder of this name; choose another {name} or move it"
        )
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not place.is_dir():
        raise ConfigError(f"{place} is a file, so the run's folder {run_dir} cannot be made; choose another {parent}")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{place} is not writable, so the run cannot be kept in {run_dir}; allow writing or choose another {parent}"
        )


def check_run_folder(run_dir: str | Path, config: Any, resume: str = "auto", keys: tuple[str, str] = RUN_KEYS) -> bool:
    """Return True if `run_dir`, which need not exist, already holds this run.

    Args:
        run_dir: the run's folder.
        config: the settings now, of an RL run or of a supervised one.
        resume: `trainer.resume`; `never` refuses a folder that holds a run.
        keys: settings that name the folder, and the folder of all runs.

    Raises:
        ConfigError: the folder cannot be created or written, holds another run, or holds files but not a run.
    """
    run_dir = Path(run_dir)
    check_writable(run_dir, keys)
    remedies = f"choose another {keys[0]} or delete {run_dir}"
    if not run_dir.exists() or all(path.name.startswith(FILE) for path in run_dir.iterdir()):
        return False
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"{run_dir} is not empty and holds no {CONFIG_FILE}, so it is not a run; {remedies}")
    if resume == "never":
        raise ConfigError(f"{run_dir} already holds a run and trainer.resume=never; {remedies}")
    try:
        stored = load_yaml(run_dir / CONFIG_FILE, type(config))
    except ConfigError as error:
        raise ConfigError(
            f"the run in {run_dir} cannot be continued by this version or command: {error}; if {CONFIG_FILE} is "
            f"damaged, copy the one in a checkpoint; or {remedies}"
        ) from error
    if isinstance(config, Config):
        keep_chunks(stored, config)
    changed = other_settings(stored, config, load(str(run_dir)))
    if changed:
        listed = ", ".join(f"{key} ({old} there, {new} now)" for key, old, new in changed)
        raise ConfigError(f"{run_dir} already holds a run with other settings: {listed}; {remedies}")
    return True


def keep_chunks(stored: Config, config: Config) -> None:
    """Replace a null `rollout.chunk_prompts` in `config` by the number of the run with the settings `stored`."""
    config.rollout.chunk_prompts = config.rollout.chunk_prompts or stored.rollout.chunk_prompts


def other_settings(stored: Any, config: Any, known: Fingerprints | None) -> list[tuple[str, Any, Any]]:
    """Return the settings that keep a run from being continued, as (key, value of the run, value now).

    Args:
        stored: settings of the run.
        config: settings now.
        known: fingerprints of the files that the run reads, if they are known; the files themselves are not compared
            here.
    """
    changed = [entry for entry in diff(stored, config) if not may_differ(entry[0])]
    return [entry for entry in changed if not same_files(*entry, known) or _lost(entry[0], config)]


def _lost(key: str, config: Any) -> bool:
    """Return True if the storage was changed to one without checkpoints of the run, so that the run was not moved
    there."""
    return key == "trainer.storage_path" and not iterations(root(config.trainer, ""))


def same_files(key: str, old: Any, new: Any, known: Fingerprints | None) -> bool:
    """Return True if two values of the setting `key` may name the same files, as far as is known without reading
    them."""
    if known is not None and known.compares(key):
        return old is not None and new is not None
    return moved.same(old, new, known is not None and known.covers(key))


def own_checkpoint(run_dir: str | Path, config: Config, say: Callable[[str], None] = print) -> Saved | None:
    """Return the newest complete checkpoint of the run in `run_dir`, from which the run continues; None if there is
    none.

    Args:
        run_dir: the run's folder.
        config: the settings now.
        say: function that gets a sentence for each newer checkpoint that is damaged.

    Raises:
        ConfigError: the run's folder was lost, and the checkpoint is of a run with other settings.
        ValueError, OSError: all checkpoints are damaged, or their storage does not answer.
    """
    place = root(config.trainer, run_dir)
    try:
        own = newest(place, say)
    except OSError as error:
        raise OSError(
            error.errno or 5, f"the checkpoints in {place} cannot be read: {error.strerror or error}"
        ) from error
    if own is not None and not (Path(run_dir) / CONFIG_FILE).is_file():
        _check_orphan(own, config)
    return own


def given_policy(config: Config, say: Callable[[str], None] = print) -> Saved | None:
    """Return the checkpoint that `trainer.resume` names, from which a new run takes the weights; None if it names none.

    Args:
        config: the settings.
        say: function that gets a sentence for each newer checkpoint that is damaged.

    Raises:
        ConfigError: the setting names a place without a complete checkpoint, or a checkpoint of another model.
        ValueError, OSError: the checkpoint is damaged, or its storage does not answer.
    """
    if config.trainer.resume in NO_PATH:
        return None
    try:
        found = find(_holder(config.trainer.resume), say)
    except ValueError as error:
        raise ConfigError(f"trainer.resume: {error}") from error
    stored, known = stored_config(found), load(found.place)
    bases = BASES if uses_critic(stored) and uses_critic(config) else BASES[:1]
    compared = OF_THE_WEIGHTS if "model" in config.trainer.accept_changed else (*bases, *OF_THE_WEIGHTS)
    problems = [
        f"{key} is {new} and was {old}"
        for key, old, new in diff(stored, config)
        if key in compared and not same_files(key, old, new, known)
    ]
    if problems:
        raise ConfigError(
            f"trainer.resume={found.place} has weights of another model: {'; '.join(problems)}; give these settings as "
            "that run had them, or begin with its saved model: model.path=RUN/model without trainer.resume"
        )
    return found


def _holder(place: str) -> str:
    """Return the folder or URL that holds the checkpoints of the run in `place`; the run's settings may name another
    one."""
    file = Path(place, CONFIG_FILE)
    if Path(place, PROGRESS).exists() or not file.is_file() or iterations(place):
        return place
    return root(load_yaml(file, Config).trainer, place)


def recover(run_dir: Path, saved: Saved | None) -> bool:
    """Write the MLflow run's id, from the checkpoint `saved`, into the run's folder if that was lost with its disk.

    Returns True if the checkpoint has an id.
    """
    if saved is None:
        return False
    mlflow_run = saved.progress.get("mlflow_run_id")
    if mlflow_run is not None:
        (run_dir / "mlflow_run_id").write_text(f"{mlflow_run}\n")
    return mlflow_run is not None


def _check_orphan(saved: Saved, config: Config) -> None:
    """Raise ConfigError if the checkpoint `saved` belongs to another run.

    It was found in `trainer.storage_path` for a run whose own folder is new or was lost.
    """
    remedies = "choose another trainer.experiment_name or trainer.storage_path, or delete it"
    if config.trainer.resume == "never":
        raise ConfigError(f"{saved.place} already holds a checkpoint and trainer.resume=never; {remedies}")
    stored = stored_config(saved)
    if isinstance(config, Config):
        keep_chunks(stored, config)
    changed = [key for key, _, _ in other_settings(stored, config, load(saved.place))]
    if changed:
        raise ConfigError(
            f"{saved.place} is a checkpoint of a run with other settings ({', '.join(changed)}); {remedies}"
        )


def stored_config(saved: Saved) -> Config:
    """Load the settings that were saved with a checkpoint. Raises ConfigError if this version does not know them."""
    filesystem, path = filesystem_of(saved.place)
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / CONFIG_FILE
        with filesystem.open_input_stream(f"{path}/{CONFIG_FILE}") as stream:
            local.write_bytes(stream.read())
        return load_yaml(local, Config)


def reached(run_dir: str | Path, config: Config) -> int:
    """Return the iteration of the run's newest complete checkpoint, or of its model if it finished and kept none
    (`trainer.max_ckpt_to_keep=0`); 0 if there is none, or the run saved no model."""
    model = Path(run_dir) / "model"
    if not (model / "config.json").is_file():
        return 0
    saved = newest(root(config.trainer, run_dir))
    if saved is None and keeps_none(run_dir) and (settings := load_settings(model)):
        return settings.iteration
    return saved.iteration if saved else 0


def keeps_none(run_dir: str | Path) -> bool:
    """Return True if the run in `run_dir` keeps no checkpoint once it has finished."""
    file = Path(run_dir) / CONFIG_FILE
    return file.is_file() and load_yaml(file, Config).trainer.max_ckpt_to_keep == 0


def no_checkpoint(run_dir: str | Path) -> str:
    """Say why a run that has finished cannot be made longer if it keeps no checkpoint."""
    return (
        "it kept no checkpoint (trainer.max_ckpt_to_keep=0), so it cannot continue; begin a new run with "
        f"model.path={run_dir}/model"
    )


def may_differ(key: str) -> bool:
    """Return True if the setting `key` may change in a continued run."""
    allowed = (*MAY_DIFFER, *SUPERVISED_MAY_DIFFER)
    return any(key == one or (one.endswith(".") and key.startswith(one)) for one in allowed)
