"""Generated prompts: a class of the user's own makes rows during training (`data.generator`)."""

from typing import Any

from pipeline.config.data import DataConfig
from pipeline.prompts.plugin import Plugin, find_class, make


class Generator(Plugin):
    """Base class of generators. Derive from it and write `generate`, which is called before every iteration."""

    def generate(self, iteration: int, count: int) -> list[dict[str, Any]]:
        """Make at most `count` rows for an iteration, in the format of the prompt files.

        Rows of the files fill up the rest. Without files it is called again for the missing rows, and a call without
        any row ends the run.

        Args:
            iteration: number of the iteration, from 1.
            count: prompts that the iteration still lacks.
        """
        raise NotImplementedError


def generator_class(name: str) -> type[Generator]:
    """Import the class `data.generator`. Raises ValueError if it does not exist or is not a `Generator`."""
    if ":" not in name:
        raise ValueError(f"data.generator {name!r} is not an import path; name your class as 'package.module:Class'")
    return find_class("data.generator", name, {}, Generator)


def make_generator(data: DataConfig, seed: int) -> Generator | None:
    """Make the generator of `data.generator`, with `data.generator_kwargs`; None without. Raises ValueError if the
    class does not exist, or does not take the arguments."""
    if data.generator is None:
        return None
    return make("data.generator", generator_class(data.generator), data, seed, data.generator_kwargs)
