"""The stream of an evaluation: only the stages that a validation row passes in training.

    pages ─► prompts ─► rollout ─► [reward model] ─► reward ─► driver

The stages and their builders come from `pipeline/stream.py`. The rows of a chunk reach the driver as one block. Prompts
are tokenised ahead of the engines and wait in Ray's object store, as in a validation.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from ray.data import Dataset

from pipeline.agent.ray_hosts import BESIDE_ENGINES, Hosts
from pipeline.config import Config
from pipeline.derived import chunk_prompts, uses_images
from pipeline.evaluate.settings import in_flight
from pipeline.greeting import Greeting
from pipeline.prompts.encode import stamp
from pipeline.prompts.stage import MAX_PAGES, loaders
from pipeline.rollout.stage import Rollout, sections
from pipeline.rows import prompt_columns
from pipeline.sampling import row_limits
from pipeline.store.versions import Ticket
from pipeline.stream import WHOLE, engines, rewarded, set_context, source


@dataclass(frozen=True)
class Pages:
    """The division of chunks into pages, the rows of the stream's source: Ray Data can hold only a limited number."""

    chunks: int
    """Number of chunks if all prompts are used; fewer are made if prompts are left out."""
    done: frozenset[int] = frozenset()
    """Numbers of the chunks that are evaluated already."""

    @property
    def page_chunks(self) -> int:
        return max(1, -(-self.chunks // MAX_PAGES))

    @property
    def count(self) -> int:
        return -(-self.chunks // self.page_chunks)


class EvaluationPrompts:
    """The prompt stage, which has one actor: makes the prompts of a page's chunks.

    Args:
        config: the settings.
        pages: the pages, with the finished chunks.
        iteration: the evaluated policy version.
        out: folder to which unusable rows are written.
    """

    def __init__(self, config: Config, pages: Pages, iteration: int, out: str) -> None:
        self._config, self._pages, self._iteration, self._out = config, pages, iteration, out
        self._chunks: Iterator[pa.Table] = iter(())
        self._next = -1

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the prompts of a page's unfinished chunks; no rows after the last prompt."""
        size = self._pages.page_chunks
        first = table["id"][0].as_py() * size
        if first != self._next:
            self._seek(first)
        rows = [prompt_columns(uses_images(self._config)).empty_table()]
        for chunk in range(first, first + size):
            prompts = next(self._chunks, None)
            if prompts is not None and chunk not in self._pages.done:
                rows.append(stamp(prompts, "val", chunk, self._iteration))
        self._next = first + size
        return pa.concat_tables(rows)

    def _seek(self, first: int) -> None:
        """Read the files again up to the chunk `first`; needed by an actor that was restarted."""
        config = self._config
        _, loader = loaders(config.data, config.model, row_limits(config), config.trainer.seed, self._out)
        assert loader is not None
        self._chunks = loader.epoch(chunk_prompts(config))
        for _ in range(first):
            next(self._chunks, None)


class FixedPolicy:
    """The policy source of an engine that has read its weights from the model's folder: admits every chunk at once.

    The tickets name the version that an engine has at its start, so engines never load another one.
    """

    async def admit(self, split: str, chunk: int, version: int) -> Ticket:
        return Ticket(-1, [])

    async def acknowledge(
        self, engine: str, version: int, crc: int, load_s: float, idle_s: float, busy_s: float
    ) -> None:
        """Do nothing; never called, because no weights are loaded."""

    async def greet(self, greeting: Greeting) -> None:
        """Do nothing; never called, because no ticket requests a handshake."""

    def beat(self, engine: str) -> None:
        """Do nothing: an evaluation has no policy store."""


def build(
    config: Config,
    pages: Pages,
    iteration: int,
    out: str,
    rollout_stage: type[Rollout] = Rollout,
    hosts: Hosts = BESIDE_ENGINES,
) -> Dataset:
    """Build the stream of one evaluation.

    Args:
        config: the result of `settings.used`.
        pages: the pages, with the finished chunks.
        iteration: the evaluated policy version.
        out: folder to which unusable rows are written.
        rollout_stage: class of the rollout stage; tests replace it.
        hosts: hosts that run the processes of episodes.
    """
    set_context()
    rollout, chunks = config.rollout, in_flight(config)
    num_engines = min(rollout.num_engines, max(1, pages.chunks - len(pages.done)))
    stream = source(pages.count, chunk_prompts(config), EvaluationPrompts, (config, pages, iteration, out), config)
    args, resources = (*sections(config), FixedPolicy(), hosts), engines(config, num_engines, chunks)
    stream = stream.map_batches(rollout_stage, fn_constructor_args=args, **resources, **WHOLE)
    return rewarded(stream, config, chunks * num_engines)
