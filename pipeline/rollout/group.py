"""The responses to a prompt as what an engine works on, for chunks that give other groups than they began with."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.rollout import vllm
from pipeline.rollout.engine import EngineLoop

Requests = Callable[[pa.Table, int], list[tuple[Any, Any]]]
"""The requests for prompts by an engine that holds a version, equally many for each prompt."""


@dataclass(frozen=True, eq=False)
class Group:
    """The responses to one prompt, under way or complete."""

    prompt: pa.Table
    """One row; or those of a whole chunk, which then is one group."""
    version: int
    """Of the policy when they were begun."""
    outputs: Future
    again: bool = False
    """Whether they were cut off and begun anew."""

    @property
    def interrupted(self) -> bool:
        """Whether the engine has stopped before the responses are complete, to go on with them later."""
        return False

    def read(self) -> list[vllm.Generation]:
        """The responses, once they are complete."""
        return [vllm.read(output, self.version) for output in self.outputs.result()]


def begin(engine: EngineLoop, prompts: pa.Table, version: int, requests: Requests) -> list[Group]:
    """Each prompt's requests are handed to the engine, which holds `version`."""
    return [Group(prompt, version, engine.submit(pairs)) for prompt, pairs in by_prompt(prompts, version, requests)]


def by_prompt(prompts: pa.Table, version: int, requests: Requests) -> Iterator[tuple[pa.Table, list[tuple[Any, Any]]]]:
    """Each prompt, as a table of one row, with its requests."""
    pairs = requests(prompts, version)
    each = len(pairs) // max(1, len(prompts))
    for number in range(len(prompts)):
        yield prompts.slice(number, 1), pairs[number * each : (number + 1) * each]


def prompts_of(groups: Sequence[Group], chunk: pa.Table) -> pa.Table:
    """The prompts of groups, as those of a chunk."""
    return stamped(pa.concat_tables([group.prompt for group in groups]), chunk)


def stamped(prompts: pa.Table, chunk: pa.Table) -> pa.Table:
    """Rows of prompts as rows of a chunk: with its number and iteration."""
    for name in ("chunk", "iteration"):
        place = prompts.column_names.index(name)
        values = pa.repeat(chunk[name][0], len(prompts))
        prompts = prompts.set_column(place, chunk.schema.field(place), values)
    return prompts
