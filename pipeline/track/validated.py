"""The end of the stream for validation rows.

In a module of its own, beside the other light stages: a worker that runs them has to import what they need, and should
not have to import the models'.
"""

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store.client import StoreClient
from pipeline.store.events import ValidationScored
from pipeline.store.policy_store import PolicyStore
from pipeline.track.trajectories import Record
from pipeline.track.validation import prompt_scores


class Validation:
    """Where validation rows leave the stream: they are recorded, and the driver gets their numbers."""

    def __init__(self, run_dir: str, store: StoreClient):
        self._record, self._store = Record(run_dir), store

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows of `table` that are not for validation."""
        for_validation = pc.equal(table["split"], "val")
        if not pc.any(for_validation).as_py():
            return table
        validation = table.filter(for_validation)
        self._record(validation)
        version = validation["iteration"][0].as_py()
        seconds = pc.max(validation["generate_s"]).as_py()
        scored = ValidationScored(version, prompt_scores(validation), seconds)
        self._store.call(PolicyStore.record_validation, scored)
        return table.filter(pc.invert(for_validation))
