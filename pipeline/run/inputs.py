"""Finds the files that decide a run's results from its settings: models, prompts, and the user's code.

| kind      | settings                                                                                        |
|-----------|-------------------------------------------------------------------------------------------------|
| `model`   | folders of models, tokenizers and adapters; of a model on the Hub the commit in the cache         |
| `prompts` | training and validation files, and the recording of a replay                                      |
| `code`    | reward functions, agents, samplers, generators, estimators, losses, and files that kwargs name    |
"""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

from pipeline.agent.inside import verl
from pipeline.agent.inside.remote import MCP, OPENENV
from pipeline.config import Config, to_flat
from pipeline.config.agent import AgentConfig
from pipeline.config.preference import DPOConfig
from pipeline.config.schema import value_of
from pipeline.config.supervised import SFTConfig, SupervisedConfig
from pipeline.imports import split
from pipeline.prompts.files import find
from pipeline.replay.recording import iteration_range
from pipeline.run import modules
from pipeline.storage.filesystem import filesystem_of
from pipeline.storage.fingerprints import COMMIT, Fingerprints, Marks, marks, stamp
from pipeline.track.trajectories import recorded_files

MODELS = (
    *("model.path", "model.tokenizer_path", "model.lora.path", "critic.path"),
    *("scoring.reference.path", "reward.model.path", "teacher.path", "teacher.adapter"),
)
UNREAD = (".md", ".png", ".jpg", ".pdf", ".log")
"""Suffixes of files in a model's folder that no code reads."""
TEMPLATES = "additional_chat_templates"
"""Name of the folder with a tokenizer's further templates."""
CACHED = ("config.json", "tokenizer_config.json", "adapter_config.json")
"""Names of files by which a model on the Hub is found in the cache; each model has at least one of them."""
PLUGINS = ("data.sampler", "data.generator", "algorithm.adv_estimator", "actor.policy_loss.loss_mode")


def fingerprints(config: Config) -> Fingerprints:
    """Compute the fingerprints of all files that a run with these settings reads, without running the user's code.

    Args:
        config: the settings; local paths are absolute.

    Raises:
        ValueError, OSError: prompt files are missing, or a file cannot be read.
    """
    models = {key: found for key in MODELS if (path := value_of(config, key)) and (found := model_marks(path))}
    for name, teacher in config.teacher.named.items():
        for key in ("path", "adapter"):
            if (path := teacher.get(key)) and (found := model_marks(path)):
                models[f"teacher.named.{name}.{key}"] = found
    code = {key: found for key, files in code_files(config) if (found := marks(files))}
    return Fingerprints(models, prompt_marks(config), code, stamp())


def supervised_fingerprints(config: SupervisedConfig) -> Fingerprints:
    """Compute the fingerprints of all files that a supervised run trains on; validation files do not count.

    Args:
        config: the settings; local paths are absolute.

    Raises:
        ValueError, OSError: training files are missing, or a file cannot be read.
    """
    taught = ["teacher.path"] if isinstance(config, SFTConfig) else []
    of_model = ((key, value_of(config, key)) for key in [*MODELS, *taught] if key.startswith("model.") or key in taught)
    models = {key: found for key, path in of_model if path and (found := model_marks(path))}
    code = {}
    if isinstance(config, DPOConfig) and all(split(config.loss.type)):
        code["loss.type"] = marks(_files(modules.files_of(split(config.loss.type)[0], modules.user_path())))
    prompts = {"data.train_files": file_marks(config.data.train_files, "data.train_files")}
    return Fingerprints(models, prompts, code, stamp())


def model_marks(path: str) -> Marks:
    """Compute the marks (size and hash) of the files in a model's folder.

    For a model on the Hub, the cached commit is the only mark; empty if it is in no cache.
    """
    folder = Path(path)
    if not folder.is_dir():
        commit = _commit(path)
        return {COMMIT: commit} if commit else {}
    files = [*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*")]
    read = [file for file in files if file.is_file() and not file.name.startswith(".") and file.suffix not in UNREAD]
    return _local((file.relative_to(folder).as_posix(), file) for file in sorted(read))


def prompt_marks(config: Config) -> dict[str, Marks]:
    """Compute the marks (size and hash) of prompt files, or of the recorded rows of a replay, by setting."""
    data, found = config.data, {}
    for key, paths in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        if paths:
            found[key] = file_marks(paths, key)
    if data.recorded_run is not None:
        recorded = recorded_files(data.recorded_run)
        if data.recorded_iterations:
            first, last = iteration_range(data.recorded_iterations)
            recorded = {number: files for number, files in recorded.items() if first <= number <= last}
        paths = [path for files in recorded.values() for path in files]
        filesystem, root = filesystem_of(data.recorded_run)
        found["data.recorded_run"] = marks((path.removeprefix(f"{root}/"), filesystem, path) for path in paths)
    return found


def file_marks(paths: Any, key: str) -> Marks:
    """Compute the marks (size and hash) of the parquet files `paths`, the value of the setting `key`."""
    files = find(paths, key)
    names = _relative([name for name, _, _ in files])
    return marks((name, *file[1:]) for name, file in zip(names, files, strict=True))


def code_files(config: Config) -> Iterator[tuple[str, list[tuple[str, pafs.FileSystem, str]]]]:
    """Yield (setting, files) for the user's code and for files that options name; a file is (name, file system,
    path)."""
    path = modules.user_path(str(config.trainer.env_vars.get("PYTHONPATH", "")))
    for key, named in _named(config):
        found: list[tuple[str, Path]] = []
        for name in named:
            is_data = os.path.isfile(name) and not name.endswith(".py")
            found += [(os.path.basename(name), Path(name))] if is_data else modules.files_of(name, path)
        yield key, _files(dict.fromkeys(found))
    for key, value in _options(to_flat(config)):
        yield key, _files([(os.path.basename(value), Path(value))])


def _named(config: Config) -> Iterator[tuple[str, list[str]]]:
    """Yield (setting, names) for each setting that names code: Python files, modules and other files."""
    custom = config.reward.custom_reward_function.path
    rewards = {"reward.custom_reward_function.path": custom}
    rewards |= {f"reward.functions.{name}.path": one.get("path") for name, one in config.reward.functions.items()}
    for key, name in rewards.items():
        if name:
            yield key, [name]
    for key in PLUGINS:
        code, name = split(value_of(config, key) or "")
        if name:
            yield key, [code]
    declared = config.agent.declared()
    for name, agent in declared.items():
        section = "agent" if name is None else f"agent.named.{name}"
        for key, named in _of_agent(agent).items():
            if named and (name is None or named != _of_agent(declared[None])[key]):
                yield f"{section}.{key}", named


def _of_agent(agent: AgentConfig) -> dict[str, list[str]]:
    tools = [name for tool in agent.tools for name in _of_spec(tool)]
    # The interpreter is not the user's code.
    words = [word for word in agent.command if not os.path.basename(word).startswith("python")]
    return {
        "environment": _of_spec(agent.environment),
        "program": _of_spec(agent.program),
        "tools": tools,
        "command": [word for word in words if os.path.isfile(word)],
    }


def _of_spec(spec: str | None) -> list[str]:
    """List the files and modules that a setting names.

    A setting is `file.py:Name`, `package.module:Name`, a YAML file of tools, or the command of a server.
    """
    if spec is None or spec.startswith(OPENENV):
        return []
    if spec.startswith(MCP):
        try:
            return [word for word in shlex.split(spec[len(MCP) :]) if os.path.isfile(word)]
        except ValueError:
            return []
    if spec.endswith((".yaml", ".yml")):
        try:
            classes = [entry["class_name"].rpartition(".")[0] for entry in verl.entries(spec)]
        except ValueError:
            # The agent reports the error as it is loaded.
            classes = []
        return [spec, *classes]
    return [split(spec)[0]]


def _options(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (setting, path) for each option of a function (`...kwargs`) that names an existing file."""
    for key, value in settings.items():
        if key.endswith("kwargs"):
            yield from ((name, text) for name, text in _texts(key, value) if os.path.isfile(text))
        elif isinstance(value, dict):
            yield from _options({f"{key}.{name}": inner for name, inner in value.items()})


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(f"{key}.{name}", inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _texts(f"{key}[{number}]", inner)


def _relative(paths: list[str]) -> list[str]:
    """Return the paths relative to their common folder."""
    shared = os.path.commonprefix([path.rpartition("/")[0] + "/" for path in paths]).rpartition("/")[0]
    return [path[len(shared) :].lstrip("/") for path in paths]


def _commit(name: str) -> str | None:
    """Return the cached commit of a model on the Hub; None if it is in no cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError

    for file in CACHED:
        try:
            place = try_to_load_from_cache(name, file)
        except HFValidationError:
            return None
        if isinstance(place, str) and "/snapshots/" in place:
            return place.partition("/snapshots/")[2].partition("/")[0]
    return None


def _files(files: Any) -> list[tuple[str, pafs.FileSystem, str]]:
    local = pafs.LocalFileSystem()
    return [(name, local, str(file)) for name, file in files]


def _local(files: Any) -> Marks:
    return marks(_files(files))
