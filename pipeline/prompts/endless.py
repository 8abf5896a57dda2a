"""The prompt stage of a run with dynamic sampling: prompts for as long as the run needs any.

How many prompts an iteration takes is known when it is full, so a page is so many **batches** of prompts, each of
an iteration's chunks, and whoever needs them takes them. The data is gone through as often as that takes. Pages end
when the last iteration is trained; of a page that was made before, what is not needed is never generated
(`DynamicStore.admit`).

The validation rows of a version stand in front of the first page that is made at that version. That version stays
current until they are recorded, and generates at least one batch, so there is such a page.
"""

from typing import Any

import pyarrow as pa

from pipeline.config import Config
from pipeline.groups import resume
from pipeline.prompts.encode import stamp, to_table
from pipeline.prompts.stage import LOOKAHEAD, Prompts, Schedule
from pipeline.prompts.supply import Supply
from pipeline.rows import PROMPT


class EndlessPrompts(Prompts):
    """The one actor of the prompt stage.

    Raises:
        ValueError: a sampler or generator learns from iterations, which prompts do not belong to here.
    """

    def __init__(self, config: Config, schedule: Schedule, store: Any, generation: int, run_dir: str):
        super().__init__(config, schedule, store, generation, run_dir, endless=True)
        if not isinstance(self._supply, Supply) or self._supply.learns:
            raise ValueError(
                f"data.sampler={config.data.sampler} learns from what became of earlier prompts, and with "
                "algorithm.filter_groups.enable=true those that were dropped are not recorded; use one that does not"
            )
        self._first_number = 1

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows of one page; none once the last iteration is trained."""
        page = table["id"][0].as_py()
        schedule, deadlines = self._schedule, self._config.trainer.deadlines
        first = page * schedule.page_iterations
        base, start = self._wait("start", deadlines.engine_start)
        # The last one of the first batch: validation rows of a version stand behind the pages made before it, and none
        # of their chunks may need the version after it, which waits for the validation.
        chunk = (first + 1) * schedule.chunks_per_iteration - 1
        opening = self._wait("open_page", page, chunk, LOOKAHEAD, deadlines.admission)
        made = [PROMPT.empty_table()]
        if opening.first and schedule.validates(opening.version, opening.over):
            made += self._validation(opening.version, base)
        if opening.over:
            self._ask("end", opening.version)
            return pa.concat_tables(made)
        if page != self._next_page:
            self._go_on(start, first)
        self._next_page = page + 1
        for batch in range(first, first + schedule.page_iterations):
            made += self._batch(batch, opening.version + 1)
        return pa.concat_tables(made)

    def _go_on(self, start: Any, batch: int) -> None:
        """Set the source to the beginning of a batch of the generation."""
        _, self._first_number, _ = resume(start)
        state, number, skip = resume(self._ask("batch_state", batch))
        self._supply.load(state)
        if skip:
            # Trained, or dropped, before the run stopped.
            self._supply.iteration(number, skip)

    def _batch(self, batch: int, iteration: int) -> list[pa.Table]:
        """The chunks of a batch. The filter says which iteration trains a row; until then it names `iteration`."""
        schedule, number = self._schedule, self._first_number + batch
        size, chunks = schedule.begun_prompts, schedule.chunks_per_iteration
        self._ask("set_batch", batch, number, self._supply.state, self._supply.counts())
        rows = self._supply.iteration(number, size * chunks)
        first = batch * chunks
        return [
            stamp(to_table(rows[chunk * size : (chunk + 1) * size]), "train", first + chunk, iteration)
            for chunk in range(chunks)
        ]
