"""Rows of a tensor group: ranks that compute one model together train on all rows that came to any of them.

Ray Data deals chunks to all ranks. Mini-batches keep their rows, because they are pooled one after the other.
"""

import pyarrow as pa
import torch.distributed as dist

from pipeline.models.mesh import Mesh


def pool(table: pa.Table, mesh: Mesh, segments: int) -> pa.Table:
    """The rows of all ranks that see the same rows as this one; a collective of these.

    Args:
        table: rows that came to this rank, as many as to each of the others.
        mesh: of the learners.
        segments: equal stretches of `table` that are parts of different mini-batches.

    Returns:
        of every segment the rows of all ranks of the group, in the order of ranks; the same on each.
    """
    if mesh.tensor is None:
        return table
    tables: list[pa.Table] = [None] * mesh.same_rows
    dist.all_gather_object(tables, table.combine_chunks(), group=mesh.tensor.get_group())
    sizes = [len(other) // segments for other in tables]
    return pa.concat_tables(
        [
            other.slice(segment * size, size)
            for segment in range(segments)
            for other, size in zip(tables, sizes, strict=True)
        ]
    )
