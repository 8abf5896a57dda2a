"""The settings that a tree of dataclasses declares, and the setting that a wrong name was meant for."""

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.config.renamed import RENAMED


@dataclass(frozen=True)
class Key:
    """One setting: its dotted name, its type, its default and the dataclass that declares it."""

    name: str
    type: Any
    default: Any
    owner: type


def keys(schema: type) -> dict[str, Key]:
    """Every setting of the dataclass `schema` by its dotted name, in the order of declaration."""
    return {key.name: key for key in _keys(schema(), "")}


def _keys(section: Any, prefix: str) -> Iterator[Key]:
    """The settings of a dataclass instance with default values, which may be others than those of its class alone."""
    types_of = typing.get_type_hints(type(section))
    for item in dataclasses.fields(section):
        name, value = prefix + item.name, getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            yield from _keys(value, name + ".")
        else:
            declares = (owner for owner in type(section).__mro__ if item.name in inspect.get_annotations(owner))
            yield Key(name, types_of[item.name], value, next(declares))


def value_of(tree: Any, name: str) -> Any:
    """The value of the setting with this dotted name."""
    for part in name.split("."):
        tree = getattr(tree, part)
    return tree


def expected(kind: Any) -> str:
    """What a value of type `kind` looks like, in words: `a whole number or null` for `int | None`."""
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
    """The valid dotted key that was most likely meant by `key`, or None when nothing is near.

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
    """Return the reason if `key` is an old key or a section, and so not a setting; else None."""
    if key in RENAMED:
        return f"the key {key} no longer exists: {RENAMED[key]}"
    inside = [name for name in valid if name.startswith(key + ".")]
    return f"{key} is a section, not a value; its keys are {', '.join(inside)}" if inside else None


def unknown(key: str, valid: dict[str, Key]) -> str:
    """Return the sentence about a key that is not in `valid`: the key that was meant, or the keys of its section."""
    if guess := nearest(key, valid):
        return f"there is no key {key}; did you mean {guess}?"
    section = key.split(".")[0]
    known = [name.removeprefix(f"{section}.") for name in valid if name.split(".")[0] == section]
    listed = f"the keys of {section} are {', '.join(known)}" if known else "see docs/configuration.md for all keys"
    return f"there is no key {key}; {listed}"
