"""Common part of samplers and generators: classes named by a setting, which may learn from scores, and have a state
that checkpoints keep."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pipeline.config.data import DataConfig
from pipeline.prompts.feedback import Outcome
from pipeline.registry import Entry, look_up


class Plugin:
    """Base class of the classes that `data.sampler` and `data.generator` name."""

    def __init__(self, data: DataConfig, seed: int) -> None:
        """Store the arguments. Subclasses get `data.sampler_kwargs` or `data.generator_kwargs` as further arguments.

        Args:
            data: the section `data`.
            seed: `trainer.seed`.
        """
        self.data = data
        self.seed = seed

    def update(self, iteration: int, outcomes: Sequence[Outcome]) -> None:
        """Learn from the outcomes of the prompts of iteration `iteration`.

        Called once for every iteration in order, `Schedule.feedback_lag` iterations later. If a class does not override
        this method, outcomes are not read.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`, with states of random generators. It must be valid as JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of `state_dict`; an empty one is the state at the beginning."""


P = TypeVar("P", bound=Plugin)


def find_class(key: str, name: str, known: Mapping[str, type[P]], base: type[P]) -> type[P]:
    """Return the class `name`, the value of the setting `key`: one of `known`, or an import path
    `package.module:Class`. Raises ValueError if it does not exist or is not derived from `base`."""
    entries = {known_name: Entry(known_name, known_class) for known_name, known_class in known.items()}
    found: Any = look_up(key, name, entries, Entry, ("data", "seed")).function
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{key} {name!r} is not a class derived from {base.__module__}.{base.__name__}; derive it")
    return found


def make(key: str, kind: type[P], data: DataConfig, seed: int, kwargs: Mapping[str, Any]) -> P:
    """Construct the class `kind`, which the setting `key` names, with the options `kwargs`.

    Raises ValueError if the constructor fails.
    """
    try:
        return kind(data, seed, **kwargs)
    # The user's class may raise anything.
    except Exception as error:
        options = f"{key}_kwargs={dict(kwargs)}" if kwargs else f"no {key}_kwargs"
        name = getattr(data, key.removeprefix("data."))
        raise ValueError(f"{key}={name} cannot be made with {options}: {type(error).__name__}: {error}") from error


def learns(kind: type[Plugin]) -> bool:
    """Return True if the class learns from the outcomes of prompts (it overrides `update`)."""
    return kind.update is not Plugin.update


def state_of(key: str, plugin: Plugin) -> dict[str, Any]:
    """Return the state of `plugin`, as it will be after it was saved and loaded as JSON.

    Raises ValueError, with the setting `key`, if the state is not valid as JSON.
    """
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
