"""Classes that a setting names (`data.sampler`, `data.generator`): found, made, and their state kept."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pipeline.config.data import DataConfig
from pipeline.registry import look_up

T = TypeVar("T")


class Stateful(Protocol):
    """What a run goes on from."""

    def state_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class _Entry:
    function: Callable[..., Any]


def find_class(key: str, name: str, known: Mapping[str, type[T]], base: type[T]) -> type[T]:
    """The class that the setting `key` names: one of `known`, or an import path `package.module:Class`.

    Raises:
        ValueError: there is none, or it is not derived from `base`.
    """
    entries = {known_name: _Entry(known_class) for known_name, known_class in known.items()}
    found: Any = look_up(key, name, entries, lambda _, function: _Entry(function), ("data", "seed")).function
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{key} {name!r} is not a class derived from {base.__module__}.{base.__name__}; derive it")
    return found


def make(key: str, made: Callable[..., T], data: DataConfig, seed: int, kwargs: Mapping[str, Any]) -> T:
    """An instance of the class of the setting `key`.

    Raises:
        ValueError: it cannot be made with these arguments.
    """
    try:
        return made(data, seed, **kwargs)
    # A class of the user's own may raise anything.
    except Exception as error:
        options = f"{key}_kwargs={dict(kwargs)}" if kwargs else f"no {key}_kwargs"
        raise ValueError(
            f"{key}={getattr(data, key.split('.')[1])} cannot be made with {options}: {type(error).__name__}: {error}"
        ) from error


def state_of(key: str, owner: Stateful) -> dict[str, Any]:
    """The state of a sampler or generator, as it will be after a restart.

    Raises:
        ValueError: JSON cannot hold it.
    """
    state = owner.state_dict()
    try:
        kept = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{key}: {type(owner).__name__}.state_dict() returned what JSON cannot hold ({error}); a checkpoint keeps "
            "it as JSON: give numbers, text, lists and dicts"
        ) from error
    if not isinstance(kept, dict):
        raise ValueError(f"{key}: {type(owner).__name__}.state_dict() returned {state!r:.80}; give a dict")
    return kept
