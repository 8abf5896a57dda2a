"""Base class for user classes that make prompts during training (`data.generator`)."""

from typing import Any

from pipeline.config.data import DataConfig
from pipeline.prompts.plugin import Plugin, find_class, make


class Generator(Plugin):
    """Base class of generators. Derive from it and write `generate`, which is called before every iteration."""

    def generate(self, iteration: int, count: int) -> list[dict[str, Any]]:
        """Return at most `count` rows for an iteration, in the format of the prompt files.

        If there are fewer, rows of `data.train_files` fill up the iteration. Without files, this method is called again
        for the missing rows, and an empty list ends the run.

        Args:
            iteration: number of the iteration, from 1.
            count: number of prompts that the iteration still lacks.
        """
        raise NotImplementedError


def generator_class(name: str) -> type[Generator]:
    """Import the class `data.generator`. Raises ValueError if it does not exist or is not a `Generator`."""
    if ":" not in name:
        raise ValueError(f"data.generator {name!r} is not an import path; name your class as 'package.module:Class'")
    return find_class("data.generator", name, {}, Generator)


def make_generator(data: DataConfig, seed: int) -> Generator | None:
    """Construct the class `data.generator` with `data.generator_kwargs`; None if the setting is null.

    Raises ValueError if the class does not exist, or does not take the arguments.
    """
    if data.generator is None:
        return None
    return make("data.generator", generator_class(data.generator), data, seed, data.generator_kwargs)
