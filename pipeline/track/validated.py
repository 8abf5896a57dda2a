"""The end of the stream for validation rows.

In a module of its own, beside the other light stages: a worker that runs them has to import what they need, and should
not have to import the models'.
"""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.ask import ask
from pipeline.track.trajectories import Record


class Validation:
    """Where validation rows leave the stream: recorded, and reported to the driver."""

    COLUMNS = (
        *("iteration", "data_source", "uid", "prompt", "response"),
        *("score", "reward_parts", "reward_error", "generate_s"),
    )

    def __init__(self, run_dir: str, store: Any, generation: int):
        self._record, self._store, self._generation = Record(run_dir), store, generation

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows of `table` that are not for validation."""
        for_validation = pc.equal(table["split"], "val")
        if not pc.any(for_validation).as_py():
            return table
        validation = table.filter(for_validation)
        self._record(validation)
        ask(self._store, "validated", self._generation, validation.select(self.COLUMNS))
        return table.filter(pc.invert(for_validation))
