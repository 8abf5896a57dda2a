"""Tables travel from stage to stage in Arrow's own stream format.

Ray describes every column of a table in Python, which takes milliseconds in each stage that a chunk passes. Arrow's
stream holds the same bytes (of a slice only its own) and is read in place.
"""

import sys
from typing import Any

import pyarrow as pa


def register() -> None:
    """Send this process's tables as streams; does nothing if it is not part of a Ray cluster."""
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.util.register_serializer(pa.Table, serializer=to_stream, deserializer=from_stream)


def to_stream(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def from_stream(stream: pa.Buffer) -> pa.Table:
    """Read the table of a stream; its columns lie in the stream's own memory."""
    with pa.ipc.open_stream(stream) as reader:
        return reader.read_all()
