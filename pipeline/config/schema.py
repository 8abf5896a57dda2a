"""Settings that a tree of dataclasses declares, their values, and the valid name for a wrong one."""

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

from pipeline.config.renamed import RENAMED


@dataclass(frozen=True)
class Key:
    """One setting: its dotted name, type and default, and `owner`, the dataclass that declares it."""

    name: str
    type: Any
    default: Any
    owner: type


def keys(schema: type) -> dict[str, Key]:
    """Return every setting of the dataclass `schema` by its dotted name, in the order of declaration."""
    return dict(_all(schema))


def _keys(section: Any, prefix: str) -> Iterator[Key]:
    """Yield the settings of `section`, an instance with default values, and of the sections in it.

    Defaults are read from the instance, since a parent section may override the defaults of the class.
    """
    types_of = typing.get_type_hints(type(section))
    for item in dataclasses.fields(section):
        name, value = prefix + item.name, getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            yield from _keys(value, name + ".")
        else:
            declares = (owner for owner in type(section).__mro__ if item.name in inspect.get_annotations(owner))
            yield Key(name, types_of[item.name], value, next(declares))


_all: Callable[[type], dict[str, Key]] = cache(lambda schema: {key.name: key for key in _keys(schema(), "")})


def value_of(tree: Any, name: str) -> Any:
    """Return the value of the setting with the dotted name `name`."""
    for part in name.split("."):
        tree = getattr(tree, part)
    return tree


def restore_tuples(config: Any) -> None:
    """Turn lists back into tuples: a YAML file has only lists."""
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            restore_tuples(value)
        elif typing.get_origin(kind) is tuple:
            setattr(config, name, tuple(value))


def to_flat(config: Any) -> dict[str, Any]:
    """Return all settings by dotted name; a mapping such as `rollout.engine_kwargs` is one value."""
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            flat |= {f"{item.name}.{name}": inner for name, inner in to_flat(value).items()}
        else:
            flat[item.name] = value
    return flat


def diff(config_a: Any, config_b: Any) -> list[tuple[str, Any, Any]]:
    """Return the settings in which two configs of the same kind differ, as (key, value in a, value in b)."""
    flat_a, flat_b = to_flat(config_a), to_flat(config_b)
    return [(key, flat_a[key], flat_b[key]) for key in flat_a if flat_a[key] != flat_b[key]]


def expected(kind: Any) -> str:
    """Describe the values of type `kind` in words: `a whole number or null` for `int | None`."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return " or ".join(expected(part) for part in typing.get_args(kind))
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return "a list" + (f", each entry {expected(args[0])}" if args[0] is not Any else "")
    if origin is tuple:
        return f"a list of {len(args)}, each {expected(args[0])}"
    if origin is dict:
        inner = expected(args[1])
        return "a mapping such as {name: value}" + (f", each value {inner}" if inner != "any value" else "")
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return words.get(kind, "any value")


def nearest(key: str, valid: Iterable[str]) -> str | None:
    """Return the valid dotted key that `key` most likely means, or None if none is similar.

    In this order: the same key with sections added or left out in front (`actor_rollout_ref.rollout.n`), the same last
    segment with the most segments in common (`actor.lr`), the most similar spelling (`data.train_bach_size`).
    """
    valid, segments = list(valid), key.split(".")
    framed = [v for v in valid if key.endswith("." + v) or v.endswith("." + key)]
    if framed:
        return max(framed, key=lambda v: (min(len(v), len(key)), -len(v)))

    def likeness(v: str) -> float:
        return difflib.SequenceMatcher(None, key, v).ratio()

    same_name = [v for v in valid if v.split(".")[-1] == segments[-1]]
    if same_name:
        return max(same_name, key=lambda v: (len(set(v.split(".")) & set(segments)), likeness(v)))

    def last_likeness(v: str) -> float:
        return difflib.SequenceMatcher(None, segments[-1], v.split(".")[-1]).ratio()

    close = [v for v in valid if last_likeness(v) >= 0.75 or min(likeness(v) - 0.25, last_likeness(v)) >= 0.6]
    return max(close, key=lambda v: last_likeness(v) + likeness(v)) if close else None


def no_longer(key: str, valid: dict[str, Key]) -> str | None:
    """Return a sentence if `key` was removed or renamed, or is a section; else None."""
    if key in RENAMED:
        return f"the key {key} no longer exists: {RENAMED[key]}"
    inside = [name for name in valid if name.startswith(key + ".")]
    return f"{key} is a section, not a value; its keys are {', '.join(inside)}" if inside else None


def unknown(key: str, valid: dict[str, Key]) -> str:
    """Write the sentence about a key that is not in `valid`: the key that was likely meant, or a list of valid keys."""
    if guess := nearest(key, valid):
        return f"the key {key} does not exist; did you mean {guess}?"
    sections = accumulate(key.split("."), "{}.{}".format)
    known = {section: [name for name in valid if name.startswith(f"{section}.")] for section in sections}
    section = max((section for section in known if known[section]), key=len, default=None)
    if section is None:
        return f"the key {key} does not exist; `slipstream docs configuration` lists all keys"
    listed = f"the keys of {section} are {', '.join(name.removeprefix(f'{section}.') for name in known[section])}"
    return f"the key {key} does not exist; {listed}"
