"""The bound on the age of rows, where the trainer takes them.

Admission alone keeps every row that is generated in one go within `algorithm.max_staleness`: this is the same promise
for whatever else brings rows to the trainer, kept where it counts.
"""

import numpy as np
import pyarrow as pa

from pipeline.advantage.config import AlgorithmConfig
from pipeline.rows import SCHEMA, flat, ragged


def staleness(table: pa.Table) -> np.ndarray:
    """[R] int64, versions between the one that trains on a row and the oldest that generated a token of it."""
    return table["iteration"].to_numpy() - 1 - table["policy_version"].to_numpy()


def within_bound(table: pa.Table, config: AlgorithmConfig) -> pa.Table:
    """`table` with a response mask of zeros in rows that are too old to train on; the very table where none is."""
    old = staleness(table) > config.max_staleness
    if config.on_stale == "correct" or not old.any():
        return table
    mask, offsets = flat(table, "response_mask")
    mask = np.where(np.repeat(old, np.diff(offsets)), 0, mask).astype(np.int8)
    field = SCHEMA.field("response_mask")
    return table.set_column(table.column_names.index(field.name), field, ragged(mask, offsets, field.type))
