"""Composition of settings: YAML files and command-line arguments become one tree of dataclasses.

Hydra merges `configs/*.yaml`, the chosen `experiment/*.yaml` and `algorithm/*.yaml` and `key=value` arguments into the
dataclasses, so types are checked and unknown keys are refused. An error of Hydra becomes one sentence that names the
file or argument, the key, the expected value and the nearest valid key. No other module uses Hydra.
"""

import copy
import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    KeyValidationError,
    OmegaConfBaseException,
)
from yaml import YAMLError

from pipeline.config import mappings
from pipeline.config.mappings import Argument
from pipeline.config.paths import expand_argument, expand_settings
from pipeline.config.renamed import FORGOTTEN, MOVED, VALUES
from pipeline.config.root import Config
from pipeline.config.schema import Key, expected, keys, no_longer, restore_tuples, unknown, value_of

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"

UNKNOWN_SOURCE = "the config"
_READ = ("True", "False", "None")
"""Python texts of values as which YAML reads unquoted names: `on` is True, `off` is False, `~` is None."""

T = TypeVar("T")

_Arguments = tuple[list[str], list[Override], list[Argument]]
"""Choices of config files for Hydra, arguments that set keys, arguments that set mappings with free names."""

_structured: Callable[[type], Any] = cache(OmegaConf.structured)
"""Convert a dataclass to an OmegaConf config, which is cached and must not be changed."""


class ConfigError(ValueError):
    """Error for settings that cannot be run. The message names the setting or settings, and the remedy."""


class UnknownKey(ConfigError):
    """Error for a key that does not exist. The message suggests the most similar valid key."""

    def __init__(self, where: str, key: str, message: str) -> None:
        """
        Args:
            where: name of the file, or text of the argument, that has the key.
            key: the dotted key.
            message: the sentence to put after `where`.
        """
        super().__init__(f"{where}: {message}")
        self.where, self.key = where, key


def load_config(
    overrides: Iterable[str] = (),
    config_name: str = "train",
    config_dir: str | Path | None = None,
    base: Config | None = None,
) -> Config:
    """Return the settings of a training run; see `load`. Only types are checked (`plan.checks.check` does the rest)."""
    return load(Config, overrides, config_name, config_dir, base)


def load(
    schema: type[T],
    overrides: Iterable[str] = (),
    config_name: str = "train",
    config_dir: str | Path | None = None,
    base: T | None = None,
) -> T:
    """Return an instance of the dataclass `schema` from `<config_name>.yaml` and `key=value` arguments.

    If the defaults list of the YAML file names `<config_name>_schema`, Hydra checks each file when it is merged, so an
    error can name the file.

    Args:
        schema: dataclass whose fields all have defaults; nested dataclasses are sections.
        overrides: arguments in Hydra's grammar, for example `actor.optim.lr=1e-5` or `experiment=countdown_cpu`.
        config_name: name of the first file, without `.yaml`.
        config_dir: another folder with config files, searched in addition to `configs/`.
        base: settings to begin with instead of the defaults.

    Raises:
        ConfigError: a file is missing, a key is unknown, or a value has the wrong type.
    """
    folders = [CONFIG_DIR]
    if config_dir is not None:
        own = Path(config_dir).resolve()
        if not own.is_dir():
            raise ConfigError(f"the config folder {config_dir} does not exist or is not a folder")
        folders.insert(0, own)
    primary = next((folder for folder in folders if (folder / f"{config_name}.yaml").is_file()), None)
    if primary is None:
        found = sorted(path.stem for folder in folders for path in folder.glob("*.yaml"))
        raise ConfigError(f"the config file {config_name}.yaml does not exist; there are: {', '.join(found)}")

    overrides = [expand_argument(text) for text in overrides]
    choices, values, entries = _checked(overrides, schema, folders)
    try:
        if base is None and primary == CONFIG_DIR and len(folders) == 1:
            composed = copy.deepcopy(_shipped(schema, config_name, *choices))
        else:
            choices += [f"hydra.searchpath=[file://{folder}]" for folder in folders if folder != primary]
            composed = _files(_structured(schema) if base is None else base, config_name, primary, choices)
        for value in values:
            OmegaConf.update(composed, value.key_or_group, value.value(), merge=True)
        merged = typing.cast(DictConfig, OmegaConf.merge(_structured(schema), composed))
        mappings.lay_over(merged, entries)
        config = OmegaConf.to_object(merged)
        for key in keys(schema).values():
            if typing.get_origin(key.type) is dict:
                mappings.check(key, value_of(config, key.name))
        mappings.compose_sections(config)
    except RecursionError as error:
        raise ConfigError("the settings hold a value whose lists or dicts are nested too deeply") from error
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise _refusal(error, str(error), schema, folders, overrides) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    restore_tuples(config)
    expand_settings(config)
    return typing.cast(T, config)


def _files(node: Any, config_name: str, primary: Path, choices: list[str]) -> DictConfig:
    """Compose the file `config_name` of the folder `primary` and the files that `choices` name, over `node`."""
    ConfigStore.instance().store(name=f"{config_name}_schema", node=node)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(primary), version_base="1.3"):
        return compose(config_name, choices)


_shipped: Callable[..., DictConfig] = cache(
    lambda schema, config_name, *choices: _files(_structured(schema), config_name, CONFIG_DIR, list(choices))
)
"""Compose files of `configs/`. Hydra takes long, so the result is cached, and must not be changed."""


def _checked(overrides: list[str], schema: type, folders: list[Path]) -> _Arguments:
    """Check command-line arguments.

    Raises:
        ConfigError: an argument cannot be read, or its key or config file does not exist.
    """
    valid, parser = keys(schema), OverridesParser.create()
    choices: list[str] = []
    values: list[Override] = []
    entries: list[Argument] = []
    groups = {file.parent.name for folder in folders for file in folder.glob("*/*.yaml")}
    for text in overrides:
        if mapping := mappings.key_of(text, valid):
            try:
                entries.append(mappings.read(text, mapping, lambda value: _parsed(parser, value)))
            except ValueError as error:
                raise ConfigError(str(error)) from error
            continue
        try:
            override = parser.parse_override(text)
        # Python refuses integers of thousands of digits with a ValueError.
        except (HydraException, RecursionError, ValueError) as error:
            raise ConfigError(
                f"the argument {text!r:.200} cannot be read as key=value ({str(error).splitlines()[0]:.200}); "
                "put values with special characters in quotes: 'key=\"value\"'"
            ) from error
        key = override.key_or_group
        if override.is_sweep_override():
            raise ConfigError(
                f"the argument {text!r} gives several values; one run takes one (a list is written [a,b])"
            )
        if key in groups:
            choices.append(text if override.is_delete() else _choice(key, override.value(), folders))
            continue
        if override.package is not None:
            raise _unknown(f"{key}@{override.package}", valid, f"the argument {text!r}")
        if override.is_delete():
            raise ConfigError(f"the argument {text!r} removes a key; every key has a value, set another one instead")
        for full in _leaf_keys(key, override.value()):
            if mapping := mappings.key_of(full, valid):
                raise ConfigError(f"the argument {text!r} sets a section; set {mapping.name}={{NAME: VALUE}} by itself")
            if full not in valid:
                raise _unknown(full, valid, f"the argument {text!r}")
        if key in valid and valid[key].type in (str, str | None) and type(override.value()) in (int, float):
            # Read as a number and made text again, `0.5_2` would be `0.52`.
            override = parser.parse_override("{}='{}'".format(*text.split("=", 1)))
        values.append(override)
    return choices, values, entries


def _parsed(parser: OverridesParser, value: str) -> Any:
    """Read a value in Hydra's grammar.

    Raises:
        ValueError: the text cannot be read, or it gives several values (a sweep).
    """
    try:
        override = parser.parse_override(f"x={value}")
    except HydraException as error:
        raise ValueError(f"the value cannot be read ({str(error).splitlines()[0]})") from error
    if override.is_sweep_override():
        raise ValueError("these are several values; one run takes one (a list is written [a,b])")
    return override.value()


def _choice(group: str, value: Any, folders: list[Path]) -> str:
    """Return the Hydra argument that merges the config files `value` of the config group `group` over earlier settings.

    Raises:
        ConfigError: the file does not exist.
    """
    options = sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})
    if value is None:
        return f"~{group}"
    if isinstance(value, dict):
        example = next(iter(_leaf_keys(group, value)))
        raise ConfigError(
            f"{group} takes the name of a file ({', '.join(options)}); set keys one by one: {example}=..."
        )
    names = [str(name) for name in value] if isinstance(value, list) else [str(value)]
    for name in names:
        if name not in options:
            raise ConfigError(f"{group}={name}: this file does not exist; there are: {', '.join(options)}")
    return f"{group}=[{','.join(names)}]" if isinstance(value, list) else f"{group}={names[0]}"


def _leaf_keys(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaf_keys(f"{key}.{getattr(name, 'text', name)}", inner)
    else:
        yield key


def _unknown(key: str, valid: dict[str, Key], where: str) -> ConfigError:
    """Return the error for a dotted key that is not in `valid`, found in the file or argument `where`."""
    if gone := no_longer(key, valid):
        return ConfigError(f"{where}: {gone}")
    return UnknownKey(where, key, unknown(key, valid))


def _refusal(error: Exception, message: str, schema: type, folders: list[Path], overrides: list[str]) -> ConfigError:
    """Return the one-sentence error for an error of Hydra or OmegaConf.

    Args:
        error: the error as raised.
        message: text of the error, from which the name of the file is read.
        schema: dataclass of the settings.
        folders: folders with config files.
        overrides: the command-line arguments.
    """
    valid, cause = keys(schema), _cause(error)
    if isinstance(cause, YAMLError):
        return ConfigError(f"a config file is not valid YAML: {' '.join(str(cause).split())}")
    full_key = getattr(cause, "full_key", None) or _value_for_section(message, valid, folders)
    if not full_key or isinstance(cause, InterpolationResolutionError):
        return ConfigError(f"the config could not be composed: {' '.join(str(cause).split())}")
    full_key = str(full_key)

    source, value = _source(message, full_key, folders, overrides)
    section, _, name = full_key.rpartition(".")
    if isinstance(cause, KeyValidationError) or name in _READ:
        # The last part is the name as YAML read it: `on` is True. null is left out.
        of_a_mapping = (mapping for mapping in valid if full_key.startswith(f"{mapping}."))
        place = next(of_a_mapping, section if name in _READ else full_key)
        return ConfigError(
            f"{source}: a name in {place or 'the file'} reads as a number, a truth value (as on, off, yes and no do) "
            'or null; names are text: write it in quotes, such as "2024": 1'
        )
    key = full_key.split("[")[0]
    is_section = full_key not in valid and any(name.startswith(full_key + ".") for name in valid)
    if is_section or isinstance(cause, ConfigKeyError | ConfigAttributeError):
        # OmegaConf names an unknown section without its keys, which show the section that was meant.
        return _unknown(next(_leaf_keys(full_key, value)), valid, source)
    mapping = mappings.key_of(key, valid)
    wanted = "another type" if mapping is None and key not in valid else expected((mapping or valid[key]).type)
    return ConfigError(f"{source}: {key}={value} does not fit; expected {wanted}")


def _value_for_section(message: str, valid: dict[str, Key], folders: list[Path]) -> str | None:
    """Return the section that the file named in `message` sets to a value that is not a mapping, or None.

    OmegaConf's error does not name that section.
    """
    sections = {".".join(name.split(".")[:i]) for name in valid for i in range(1, name.count(".") + 1)}
    for section in sorted(sections):
        source, value = _source(message, section, folders, [])
        if source != UNKNOWN_SOURCE and value is not None and not isinstance(value, dict):
            return section
    return None


def _cause(error: BaseException) -> BaseException:
    """Return the YAML error, or the innermost OmegaConf error with a key, in the chain of causes of `error`; else
    `error`."""
    found = error
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, YAMLError) or getattr(seen, "full_key", None):
            found = seen
        seen = seen.__cause__ or seen.__context__
    return found


def _source(message: str, full_key: str, folders: list[Path], overrides: list[str]) -> tuple[str, Any]:
    """Return (name of the config file or text of the argument that set `full_key`, value).

    The file is read from Hydra's `message`. If neither is found, the result is (`UNKNOWN_SOURCE`, "?").
    """
    if message.startswith("In '"):
        name = message.split("'")[1]
        for folder in folders:
            path = folder / f"{name}.yaml"
            if path.is_file():
                content = OmegaConf.to_container(OmegaConf.load(path))
                for segment in full_key.split("[")[0].split("."):
                    content = content.get(segment) if isinstance(content, dict) else None
                return f"{path}", content
    for text in overrides:
        if text.lstrip("+").split("=")[0] == full_key.split("[")[0]:
            return f"the argument {text!r}", text.split("=", 1)[1]
    return UNKNOWN_SOURCE, "?"


def save_yaml(config: Any, path: str | Path) -> None:
    """Write the settings to `path` as YAML, atomically: a reader finds the old file or the new one."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    part.write_text(OmegaConf.to_yaml(dataclasses.asdict(config)), encoding="utf-8")
    part.replace(path)


def load_yaml(path: str | Path, schema: type[T]) -> T:
    """Read settings that `save_yaml` wrote. Missing keys take their defaults.

    Old keys and values are replaced by current ones (see `pipeline/config/renamed.py`).

    Raises:
        ConfigError: the file is missing, empty or not YAML, a key is unknown, or a value has the wrong type.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"the config file {path} does not exist")
    try:
        content = OmegaConf.load(path)
        if not content:
            raise ConfigError(f"{path} is empty")
        _update(content)
        config = OmegaConf.to_object(OmegaConf.merge(_structured(schema), content))
        mappings.compose_sections(config)
    except RecursionError as error:
        raise ConfigError(f"{path} holds a value whose lists or dicts are nested too deeply") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is damaged: it is not text ({error})") from error
    except (OmegaConfBaseException, YAMLError) as error:
        # `_refusal` expects the file's name in the form of Hydra's messages.
        message = f"In '{path.stem}': {error}"
        raise _refusal(error, message, schema, [path.resolve().parent], []) from error
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{path}: {error}") from error
    restore_tuples(config)
    return typing.cast(T, config)


def _update(content: Any) -> None:
    """Replace old keys and values by current ones, also in named agents, and remove the keys of `FORGOTTEN`."""
    for key in (*FORGOTTEN, *MOVED, *VALUES):
        *sections, name = key.split(".")
        place = content
        for section in sections:
            place = place.get(section) if isinstance(place, DictConfig) else None
        named = place.get("named") if isinstance(place, DictConfig) else None
        for one in (place, *(named.values() if isinstance(named, DictConfig) else ())):
            if not isinstance(one, DictConfig) or name not in one:
                continue
            if key in VALUES:
                one[name] = VALUES[key].get(one[name], (one[name],))[0]
            elif (old := one.pop(name)) is not None and key in MOVED:
                one[MOVED[key].rpartition(".")[2]] = old
