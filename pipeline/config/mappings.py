"""Command-line arguments that set a mapping with free names, such as `reward.source_scale.openai/gsm8k=2`.

Hydra's grammar does not allow most names of data sources, so these arguments are read here and merged into the
settings after Hydra has composed them.

    reward.source_scale.openai/gsm8k=2          if values are not mappings, all up to the first `=` is one name
    'reward.source_scale."x=y"=2'               a name in quotes, as in JSON
    'reward.rule_kwargs={"math.v2": {"strict": true}}'  JSON, or Hydra's {name: value}
    ~reward.source_scale.openai/gsm8k           removes a name that a file has set
"""

import json
import re
import typing
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.agent import AgentConfig
from pipeline.config.renamed import RENAMED
from pipeline.config.reward import FunctionConfig
from pipeline.config.schema import Key, expected, keys, no_longer, unknown, value_of
from pipeline.config.teacher import TeacherConfig

SECTIONS: dict[str, type] = {
    "agent.named": AgentConfig,
    "reward.functions": FunctionConfig,
    "teacher.named": TeacherConfig,
}
"""Settings that map free names to sections, each with the dataclass of its sections."""
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True)
class Argument:
    """A command-line argument that sets a mapping, or entries in it."""

    text: str
    """The argument as typed."""
    key: Key
    """Setting that holds the mapping."""
    names: tuple[str, ...]
    """Names from the outermost mapping to the value; empty if the whole mapping is set."""
    value: Any
    removes: bool = False
    """True if the argument removes the entry (`~KEY.NAME`)."""

    @property
    def place(self) -> str:
        """Key and names, joined by dots as in an argument."""
        return ".".join([self.key.name, *(_written(name) for name in self.names)])


def key_of(text: str, valid: dict[str, Key]) -> Key | None:
    """Return the setting of a mapping that the argument `text` sets, wholly or in part; None if it sets no mapping."""
    name = text.lstrip("+~")
    for key in valid.values():
        begins = typing.get_origin(key.type) is dict and name.startswith(key.name)
        if begins and name[len(key.name) :][:1] in ("", ".", "="):
            return key
    return None


def read(text: str, key: Key, parse: Callable[[str], Any]) -> Argument:
    """Read the argument `text`, which sets the mapping `key`; `parse` reads a value in Hydra's grammar.

    Raises:
        ValueError: the names or the value cannot be read (also if `parse` raises it).
    """
    removes, rest = text.startswith("~"), text.lstrip("+~")[len(key.name) :]
    names: list[str] = []
    depth = _depth(key.type)
    while rest.startswith("."):
        rest = rest[1:]
        if quoted := _QUOTED.match(rest):
            names.append(json.loads(quoted[0]))
            rest = rest[quoted.end() :]
            continue
        end = min((place for mark in ("=", '."') if (place := rest.find(mark)) >= 0), default=len(rest))
        plain = rest[:end].split(".", -1 if depth is None else max(0, depth - len(names) - 1))
        names, rest = names + plain, rest[end:]
        if not all(plain):
            raise ValueError(f'the argument {text!r} has an empty name; an empty name is written ""')
    if rest[:1] not in ("", "=") or not (rest or removes):
        raise ValueError(f"the argument {text!r} cannot be read as key=value; {_form(key)}")
    if removes:
        return Argument(text, key, tuple(names), None, removes=True)
    try:
        value = _value(rest[1:], parse)
    except ValueError as error:
        raise ValueError(f"the argument {text!r}: {error}; {_form(key)}") from error
    if _inner(key.type, len(names)) is str and not isinstance(value, str | None):
        # Read as a number or a truth value and made text again, `1.10` would be `1.1`.
        value = rest[1:]
    return Argument(text, key, tuple(names), value)


def lay_over(settings: DictConfig, entries: Iterable[Argument]) -> None:
    """Apply `entries` to `settings`, in order. A value that is a mapping is merged with the existing mapping, but an
    empty mapping replaces it.

    Raises:
        ValueError: a value has the wrong type, or a name to be removed does not exist.
    """
    # Hydra forbids new names in mappings; sections have no others than their fields anyway.
    OmegaConf.set_struct(settings, None)
    for entry in entries:
        try:
            if entry.removes:
                _remove(settings, entry)
                continue
            node: Any = settings
            *sections, last = (*entry.key.name.split("."), *entry.names)
            for name in sections:
                node = _mapping(node, name)
            _set(node, last, entry.value)
        except OmegaConfBaseException as error:
            value, kind = entry.text.split("=", 1)[-1], expected(_inner(entry.key.type, len(entry.names)))
            raise ValueError(
                f"the argument {entry.text!r}: {entry.place}={value} does not fit; expected {kind}; {_form(entry.key)}"
            ) from error


def check(key: Key, value: Any) -> None:
    """Check the entries of the mapping `value`, the value of the setting `key`; OmegaConf does not check them.

    Raises:
        ValueError: a name is not text, or a value has the wrong type.
    """
    kind = typing.get_args(key.type)[1]
    for name, inner in value.items():
        _check_names(f"{key.name}.{_written(name)}", inner)
        if not _fits(inner, kind):
            place = f"{key.name}.{_written(name)}"
            raise ValueError(f"{place}={inner!r} does not fit; expected {expected(kind)}")


def _check_names(place: str, value: Any) -> None:
    for name, inner in value.items() if isinstance(value, dict) else ():
        if not isinstance(name, str):
            raise ValueError(f'the name {name!r} in {place} is not text; write it in quotes, such as "2024": 1')
        _check_names(f"{place}.{_written(name)}", inner)


def compose_sections(config: Any) -> None:
    """Check the sections in the mappings of `SECTIONS`, and convert their values to the types of their keys, in place.

    Raises:
        ValueError: a key is unknown, or a value has the wrong type.
    """
    for mapping in SECTIONS.keys() & keys(type(config)).keys():
        sections = value_of(config, mapping)
        sections.update({name: _section(mapping, name, settings) for name, settings in sections.items()})


def _section(mapping: str, name: str, settings: Any) -> dict[str, Any]:
    place, schema = f"{mapping}.{_written(name)}", SECTIONS[mapping]
    if not isinstance(settings, dict):
        raise ValueError(f"{place}={settings!r} does not fit; expected a mapping such as {{name: value}}")
    # A section cannot hold its own mapping: `agent.named.NAME.named` is not valid.
    valid = {f"{place}.{inner}": key for inner, key in keys(schema).items() if not mapping.endswith(f".{inner}")}
    given = {}
    for inner, value in settings.items():
        full = f"{place}.{inner}"
        if (removed := RENAMED.get(f"{mapping.rpartition('.')[0]}.{inner}")) is not None:
            raise ValueError(f"the key {full} no longer exists: {removed}")
        if full not in valid:
            raise ValueError(f"the config: {no_longer(full, valid) or unknown(full, valid)}")
        try:
            typed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), {inner: value}))
        except OmegaConfBaseException as error:
            raise ValueError(f"{full}={value!r} does not fit; expected {expected(valid[full].type)}") from error
        given[inner] = getattr(typed, inner)
        if typing.get_origin(valid[full].type) is dict:
            check(replace(valid[full], name=full), given[inner])
    return given


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if typing.get_origin(kind) in (dict, list):
        inner = typing.get_args(kind)[-1]
        parts = value.values() if isinstance(value, dict) else value
        return isinstance(value, typing.get_origin(kind)) and all(_fits(part, inner) for part in parts)
    return isinstance(value, kind)


def _mapping(node: Any, name: str) -> Any:
    """Return the mapping `name` of `node`; create it if it is missing."""
    if not isinstance(node.get(name), DictConfig):
        node[name] = {}
    return node[name]


def _set(node: Any, name: str, value: Any) -> None:
    if not isinstance(value, dict) or not value:
        node[name] = value
        return
    inner = _mapping(node, name)
    for key, part in value.items():
        _set(inner, key, part)


def _remove(settings: DictConfig, entry: Argument) -> None:
    node: Any = OmegaConf.select(settings, entry.key.name)
    if not entry.names:
        node.clear()
        return
    *parents, last = entry.names
    for name in parents:
        node = node.get(name, {})
    if last not in node:
        there = ", ".join(map(_written, node)) or "none"
        raise ValueError(f"the argument {entry.text!r} removes {entry.place}, which is not set; there are: {there}")
    del node[last]


def _form(key: Key) -> str:
    return f"names and values can be given as JSON: '{key.name}={{\"NAME\": VALUE}}'"


def _written(name: str) -> str:
    return name if re.fullmatch(r"[\w/ -]+", name) else json.dumps(name, ensure_ascii=False)


def _depth(kind: Any) -> int | None:
    """Return the number of names from a mapping to its values; None if values may be mappings of any depth."""
    value = typing.get_args(kind)[1]
    if value is Any:
        return None
    if typing.get_origin(value) is not dict:
        return 1
    inner = _depth(value)
    return None if inner is None else inner + 1


def _inner(kind: Any, names: int) -> Any:
    """Return the type of the values that lie `names` levels inside a mapping."""
    for _ in range(names):
        kind = typing.get_args(kind)[1] if typing.get_origin(kind) is dict else Any
    return kind


def _value(text: str, parse: Callable[[str], Any]) -> Any:
    braces = text.lstrip().startswith("{")
    if braces:
        with suppress(json.JSONDecodeError):
            return json.loads(text)
    try:
        return _named_by_text(parse(text), text)
    except ValueError:
        # Hydra takes no quotes around names, and no letters but ASCII in them.
        if braces:
            with suppress(yaml.YAMLError):
                return _named_by_text(yaml.safe_load(text), text)
        raise


def _named_by_text(value: Any, text: str) -> Any:
    """Convert names of mappings that were read as numbers, truth values or null back to their text.

    Args:
        value: the value as read.
        text: the argument's text, which must contain the name in its JSON form.

    Raises:
        ValueError: the original spelling of a name is not known.
    """
    if isinstance(value, list):
        return [_named_by_text(part, text) for part in value]
    if not isinstance(value, dict):
        return value
    return {_name(name, text): _named_by_text(inner, text) for name, inner in value.items()}


def _name(name: Any, text: str) -> str:
    if isinstance(name, str):
        return name
    shown = json.dumps(name)
    if not re.search(rf"(?<![\w.+-]){re.escape(shown)}\s*:", text):
        raise ValueError(f"the name {shown} may be written in several ways; write it in quotes")
    return shown
