"""Generated prompts: a class of the user's own makes rows as training goes (`data.generator`)."""

from collections.abc import Sequence
from typing import Any

from pipeline.config.data import DataConfig
from pipeline.prompts.feedback import Outcome
from pipeline.prompts.plugin import find_class, make


class Generator:
    """Makes prompts. Derive from it and write `generate`; a run asks it before every iteration."""

    def __init__(self, data: DataConfig, seed: int) -> None:
        """Subclasses take `data.generator_kwargs` as further arguments.

        Args:
            data: the section `data`.
            seed: `trainer.seed`.
        """
        self.data = data
        self.seed = seed

    def generate(self, iteration: int, count: int) -> list[dict[str, Any]]:
        """At most `count` rows for an iteration, in the format of the prompt files.

        Rows of the files fill up what is missing. Where there are no files, it is asked again for what is missing, and
        no row at all ends the run.

        Args:
            iteration: number of the iteration, from 1.
            count: prompts that the iteration still lacks.
        """
        raise NotImplementedError

    def update(self, iteration: int, outcomes: Sequence[Outcome]) -> None:
        """What became of the prompts that an iteration trained. Called for every iteration in turn, some late.

        Where no subclass has this method, outcomes are not read.
        """

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on from here, as JSON can hold it; random states included."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, or from the beginning where it is empty."""


def generator_class(name: str) -> type[Generator]:
    """The class that `data.generator` names.

    Raises:
        ValueError: there is none, or it is no `Generator`.
    """
    if ":" not in name:
        raise ValueError(f"data.generator {name!r} is no import path; name a class of yours as 'package.module:Class'")
    return find_class("data.generator", name, {}, Generator)


def make_generator(data: DataConfig, seed: int) -> Generator | None:
    """The generator of `data.generator`, with `data.generator_kwargs`; None without.

    Raises:
        ValueError: the class does not exist, or does not take the arguments.
    """
    if data.generator is None:
        return None
    return make("data.generator", generator_class(data.generator), data, seed, data.generator_kwargs)
