"""The bound on the age of rows, where the trainer takes them."""

import pyarrow as pa
import pytest

from pipeline.advantage.config import AlgorithmConfig
from pipeline.rows import SCHEMA
from pipeline.train.staleness import staleness, within_bound

ROWS = {
    "iteration": [7, 7, 7, 7],
    "policy_version": [6, 5, 4, 2],
    "response_mask": [[1, 1], [1, 0, 1], [], [1, 1, 1]],
}


def table() -> pa.Table:
    return pa.Table.from_pydict(ROWS, schema=pa.schema([SCHEMA.field(name) for name in ROWS]))


def test_age_is_counted_from_the_version_that_trains() -> None:
    assert staleness(table()).tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize(("bound", "kept"), [(0, 1), (1, 2), (2, 3), (3, 3), (4, 4)])
def test_rows_past_the_bound_keep_their_place_and_train_nothing(bound: int, kept: int) -> None:
    made = within_bound(table(), AlgorithmConfig(max_staleness=bound))
    masks = made["response_mask"].to_pylist()
    assert masks[:kept] == ROWS["response_mask"][:kept]
    assert masks[kept:] == [[0] * len(mask) for mask in ROWS["response_mask"][kept:]]
    assert made.schema == table().schema
    assert made.drop_columns("response_mask") == table().drop_columns("response_mask")


def test_with_correct_they_train_as_others_do() -> None:
    assert within_bound(table(), AlgorithmConfig(on_stale="correct")) == table()
