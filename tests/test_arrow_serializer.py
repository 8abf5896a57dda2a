"""Tables on their way between stages."""

import pyarrow as pa
import pytest
import ray
from ray._private.arrow_serialization import _arrow_table_reduce
from ray.cloudpickle import CloudPickler

from pipeline import arrow_serializer as blocks

ROWS = 1000
TABLE = pa.table(
    {
        "id": pa.array(range(ROWS), pa.int64()),
        "ids": pa.array([list(range(i % 7)) if i % 5 else None for i in range(ROWS)], pa.list_(pa.int32())),
        "text": pa.array([f"row {i}" * (i % 3) if i % 4 else None for i in range(ROWS)]),
        "runs": pa.array(
            [[{"version": i, "tokens": 2}] for i in range(ROWS)],
            pa.list_(pa.struct([("version", pa.int64()), ("tokens", pa.int32())])),
        ),
        "none": pa.nulls(ROWS),
    }
).replace_schema_metadata({"a": "b"})


@pytest.mark.parametrize(
    "table",
    [TABLE, TABLE.slice(3, 5), TABLE.slice(0, 0), pa.concat_tables([TABLE.slice(7, 9), TABLE]), pa.table({})],
    ids=["whole", "slice", "empty", "chunks", "no-columns"],
)
def test_a_table_comes_back_as_it_was(table: pa.Table) -> None:
    back = blocks.from_stream(blocks.to_stream(table))
    assert back.equals(table) and back.schema.equals(table.schema, check_metadata=True)
    back.validate(full=True)


def test_a_slice_takes_its_own_rows_along_and_no_others() -> None:
    assert blocks.to_stream(TABLE.slice(100, 10)).size < blocks.to_stream(TABLE).size / 20


@pytest.mark.ray
def test_workers_that_know_rows_send_streams(ray_session: None) -> None:
    @ray.remote(num_cpus=0)
    def sent() -> tuple[bool, pa.Table]:
        import pipeline.rows  # noqa: F401

        return CloudPickler.dispatch[pa.Table] is not _arrow_table_reduce, TABLE

    registered, table = ray.get(sent.remote(), timeout=60)
    assert registered and table.equals(TABLE)
