"""Tables travel from stage to stage in Arrow's own stream format.

Ray describes every column of a table in Python, which takes milliseconds in each stage that a chunk passes. Arrow's
stream holds the same bytes (of a slice only its own) and is read in place.
"""

import sys
from typing import Any

import pyarrow as pa


def register() -> None:
    """Let Ray serialise the Arrow tables of this process as IPC streams.

    Does nothing if the process is not part of a Ray cluster.
    """
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.util.register_serializer(pa.Table, serializer=to_stream, deserializer=from_stream)


def to_stream(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def from_stream(stream: pa.Buffer) -> pa.Table:
    """Read the table in an IPC stream without copying: its columns use the memory of the stream."""
    with pa.ipc.open_stream(stream) as reader:
        return reader.read_all()
