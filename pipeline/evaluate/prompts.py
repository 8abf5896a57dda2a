"""The first stage of an evaluation: page numbers in, the prompts of a few chunks out.

As in training, one actor turns pages into rows, one page after the other. What paces it here is how many chunks the
driver has received: prompts of a long file are made as they are needed and never wait in numbers.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray

from pipeline.config import Config
from pipeline.prompts.encode import stamp
from pipeline.prompts.stage import MAX_PAGES, sources
from pipeline.rows import PROMPT


@dataclass(frozen=True)
class Pages:
    """How the chunks of a file are laid into pages."""

    chunks: int
    """Chunks of all prompts; there are fewer where prompts are left out."""
    done: frozenset[int] = frozenset()
    """Chunks whose responses there are already."""

    @property
    def page_chunks(self) -> int:
        return max(1, -(-self.chunks // MAX_PAGES))

    @property
    def count(self) -> int:
        return -(-self.chunks // self.page_chunks)

    def made_before(self, page: int) -> int:
        """Chunks that are made for all pages before `page`."""
        first = page * self.page_chunks
        return first - sum(chunk < first for chunk in self.done)


class Pace:
    """The actor that holds the prompt stage back.

    Args:
        ahead: chunks that may be made before the driver has received any.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead, self._received = ahead, 0
        self._changed = asyncio.Condition()

    async def received(self, chunks: int) -> None:
        """The driver has received so many chunks."""
        async with self._changed:
            self._received = chunks
            self._changed.notify_all()

    async def wait(self, made: int, timeout: float) -> None:
        """Wait until more than `made` chunks may have been made.

        Raises:
            TimeoutError: no chunk was received for `timeout` seconds.
        """
        async with self._changed:
            while made >= self._received + self._ahead:
                try:
                    await asyncio.wait_for(self._changed.wait(), timeout)
                except TimeoutError:
                    raise TimeoutError(
                        f"prompts: {made} chunks were made, {self._received} were received, and none in the last "
                        f"{timeout:.0f} s (trainer.deadlines.rows)"
                    ) from None


class EvaluationPrompts:
    """The one actor of the stage.

    Args:
        config: the settings.
        pages: which chunks there are.
        iteration: the policy version that is evaluated.
        pace: handle of `Pace`.
        out: where unusable rows are set aside.
    """

    def __init__(self, config: Config, pages: Pages, iteration: int, pace: Any, out: str) -> None:
        self._config, self._pages, self._iteration, self._pace, self._out = config, pages, iteration, pace, out
        self._chunks: Iterator[pa.Table] | None = None
        self._next = 0

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows of one page's chunks that are not done; none behind the last prompt."""
        page, size = table["id"][0].as_py(), self._pages.page_chunks
        timeout = self._config.trainer.deadlines.rows
        # The actor has the deadline.
        ray.get(self._pace.wait.remote(self._pages.made_before(page), timeout), timeout=None)
        first, made = page * size, [PROMPT.empty_table()]
        for chunk, prompts in self._from(first):
            if chunk not in self._pages.done:
                made.append(stamp(prompts, "val", chunk, self._iteration))
            if chunk == first + size - 1:
                break
        return pa.concat_tables(made)

    def _from(self, first: int) -> Iterator[tuple[int, pa.Table]]:
        """The chunks from number `first` on; a restarted actor reads the files once more up to there."""
        if self._chunks is None or first < self._next:
            _, source = sources(self._config, self._out)
            assert source is not None
            self._chunks, self._next = source.validation_rows(self._config.rollout.chunk_prompts), 0
        for prompts in self._chunks:
            self._next += 1
            if self._next > first:
                yield self._next - 1, prompts
