"""The common part of samplers and generators: a setting names the class, it may learn, its state is kept."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pipeline.config.data import DataConfig
from pipeline.prompts.feedback import Outcome
from pipeline.registry import Entry, look_up


class Plugin:
    """Base class of the classes that `data.sampler` and `data.generator` name."""

    def __init__(self, data: DataConfig, seed: int) -> None:
        """Store the arguments. Subclasses take `data.sampler_kwargs` or `data.generator_kwargs` as further arguments.

        Args:
            data: the section `data`.
            seed: `trainer.seed`.
        """
        self.data = data
        self.seed = seed

    def update(self, iteration: int, outcomes: Sequence[Outcome]) -> None:
        """Learn from the outcomes of an iteration's prompts. Called for every iteration in turn, some late.

        If no subclass overrides this method, outcomes are not read.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`, as JSON can hold it; random states included."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, or from the beginning if it is empty."""


P = TypeVar("P", bound=Plugin)


def find_class(key: str, name: str, known: Mapping[str, type[P]], base: type[P]) -> type[P]:
    """Import the class that the setting `key` names: one of `known`, or an import path `package.module:Class`. Raises
    ValueError if it does not exist or is not derived from `base`."""
    entries = {known_name: Entry(known_name, known_class) for known_name, known_class in known.items()}
    found: Any = look_up(key, name, entries, Entry, ("data", "seed")).function
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{key} {name!r} is not a class derived from {base.__module__}.{base.__name__}; derive it")
    return found


def make(key: str, kind: type[P], data: DataConfig, seed: int, kwargs: Mapping[str, Any]) -> P:
    """Make an instance of the class of the setting `key`. Raises ValueError if these options do not fit."""
    try:
        return kind(data, seed, **kwargs)
    # The user's class may raise anything.
    except Exception as error:
        options = f"{key}_kwargs={dict(kwargs)}" if kwargs else f"no {key}_kwargs"
        name = getattr(data, key.removeprefix("data."))
        raise ValueError(f"{key}={name} cannot be made with {options}: {type(error).__name__}: {error}") from error


def learns(kind: type[Plugin]) -> bool:
    """Return whether the class uses the outcomes of prompts."""
    return kind.update is not Plugin.update


def state_of(key: str, plugin: Plugin) -> dict[str, Any]:
    """Return the state of the plugin of the setting `key`, as it will be after a restart. Raises ValueError if JSON
    cannot hold it."""
    state = plugin.state_dict()
    name = f"{key}: {type(plugin).__name__}.state_dict()"
    try:
        kept = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} returned what JSON cannot hold ({error}); a checkpoint keeps it as JSON: give numbers, text, "
            "lists and dicts"
        ) from error
    if not isinstance(kept, dict):
        raise ValueError(f"{name} returned {state!r:.80}; give a dict")
    return kept
