"""The trainer's side of a weight update: own shards into the object store, refs to the policy store.

Every rank copies the rows it holds of each parameter into a few large byte buffers and puts those; nothing is gathered
between ranks. Buckets are cut by the parameters' whole sizes, so every rank has the same parameters in the same bucket
and an engine can load bucket by bucket (`pipeline/weights/load.py`).

A `Sender` does so version after version. With `trainer.weight_transport=delta` it keeps what it sent last, and puts
what has changed since beside it (`pipeline/weights/delta.py`); with `nixl` it keeps the buckets where engines
read them (`outbox.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Sharded
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from pipeline.stats import Stat, Stats, mean
from pipeline.weights.delta import MOST_STEPS, Step, encode, pieces_of
from pipeline.weights.load import Piece, Shard, crc
from pipeline.weights.outbox import Outbox


def rows_of(parameter: torch.Tensor, rank: int) -> tuple[torch.Tensor, int]:
    """This rank's rows of a parameter and the number of its first row; an unsharded one belongs to rank 0 alone.

    Raises:
        ValueError: the parameter is sharded along another dimension than the first.
    """
    if not isinstance(parameter, DTensor):
        return (parameter if rank == 0 else parameter[:0] if parameter.dim() else parameter.new_empty(0)), 0
    if any(isinstance(p, Sharded) and p.dim != 0 for p in parameter.placements):
        raise ValueError(f"a parameter is sharded as {parameter.placements}; only rows (Shard(0)) can be broadcast")
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), offset[0] if offset else 0


def buckets(model: nn.Module, dtype: torch.dtype, limit: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Parameters in order, in groups of at most `limit` bytes as `dtype`; a larger one is a group of its own."""
    group: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in model.named_parameters():
        nbytes = parameter.numel() * dtype.itemsize
        if group and size + nbytes > limit:
            yield group
            group, size = [], 0
        group.append((name, parameter))
        size += nbytes
    if group:
        yield group


@torch.no_grad()
def pack(
    model: nn.Module,
    rank: int,
    dtype: torch.dtype,
    limit: int,
    put: Callable[[Any], Any],
    rename: Callable[[str], str] = str,
    outbox: Outbox | None = None,
) -> Shard:
    """This rank's part of the current weights.

    Args:
        model: sharded along dimension 0, or not at all.
        rank: rank of this process.
        dtype: type the weights travel in; the engine's.
        limit: bytes of a bucket over all ranks (`trainer.weight_bucket_mb`).
        put: stores a uint8 numpy array and returns what fetches it; `ray.put`.
        rename: turns a parameter's name into the engine's.
        outbox: where the buckets are to stand, in its next version; `put` then gets uint8 tensors.
    """
    shard = Shard(rank, [], [], [], itemsize=dtype.itemsize)
    for number, group in enumerate(buckets(model, dtype, limit)):
        local = [(name, parameter, *rows_of(parameter, rank)) for name, parameter in group]
        size = sum(rows.numel() for _, _, rows, _ in local) * dtype.itemsize
        buffer = outbox.empty(size) if outbox else torch.empty(size, dtype=torch.uint8)
        offset = 0
        for name, parameter, rows, start in local:
            nbytes = rows.numel() * dtype.itemsize
            buffer[offset : offset + nbytes].view(dtype).copy_(rows.reshape(-1))
            if nbytes:
                stop = start + (rows.shape[0] if rows.dim() else 1)
                kind, shape = str(dtype).removeprefix("torch."), tuple(parameter.shape)
                shard.pieces.append(Piece(rename(name), kind, shape, start, stop, number, offset, nbytes))
            offset += nbytes
        data: Any = buffer if outbox else buffer.numpy()
        # On a GPU this also waits until the bytes are written.
        shard.checksums.append(crc(data))
        shard.buckets.append(put(data))
    return shard


class Sender:
    """One rank's weights of one model, version after version.

    Args:
        rank, dtype, limit, put, rename: as of `pack`.
        delta: whether changes are put beside whole buckets.
        outbox: where the buckets stand instead of being put.
    """

    def __init__(
        self,
        rank: int,
        dtype: torch.dtype,
        limit: int,
        put: Callable[[Any], Any],
        rename: Callable[[str], str] = str,
        delta: bool = False,
        outbox: Outbox | None = None,
    ) -> None:
        self._args = rank, dtype, limit
        self._put: Callable[[Any], Any] = outbox.put if outbox else put
        self._rename, self._delta, self._outbox = rename, delta, outbox
        self._version = -1
        self._sent: list[np.ndarray] = []
        self._steps: list[Step] = []
        self.whole_bytes = 0
        """Of the last version's buckets."""
        self.bytes = 0
        """Of these, what an engine fetches that holds the version before."""

    def stats(self) -> Stats:
        """Metrics of the last version."""
        sent, whole = float(self.bytes), float(self.whole_bytes)
        return {"perf/weight_bytes": Stat("sum", (sent,)), "perf/weight_bytes_ratio": mean(sent, whole)}

    def pack(self, model: nn.Module, version: int) -> Shard:
        """This rank's part of the current weights, which are those of `version`."""
        buffers: list[Any] = []

        def put(buffer: Any) -> Any:
            buffers.append(buffer)
            return self._put(buffer)

        if self._outbox:
            rank, dtype, _ = self._args
            numbers = sum(rows_of(parameter, rank)[0].numel() for parameter in model.parameters())
            self._outbox.begin(version, numbers * dtype.itemsize)
        shard = pack(model, *self._args, put, self._rename, self._outbox)
        self.whole_bytes = self.bytes = sum(map(len, buffers))
        if not self._delta:
            return shard
        if version == self._version + 1 and [len(b) for b in buffers] == [len(b) for b in self._sent]:
            changes = [
                encode(old, new, pieces_of(shard, number), shard.itemsize)
                for number, (old, new) in enumerate(zip(self._sent, buffers, strict=True))
            ]
            self.bytes = sum(map(len, changes))
            self._steps.append(Step(self._version, [self._put(change) for change in changes], self.bytes))
        else:
            self._steps.clear()
        # A way that is as long as the whole helps nobody.
        while self._steps and (
            len(self._steps) > MOST_STEPS or sum(step.nbytes for step in self._steps) >= self.whole_bytes
        ):
            del self._steps[0]
        self.bytes = min(self.bytes, self.whole_bytes)
        self._version, self._sent = version, buffers
        return replace(shard, version=version, steps=list(self._steps))
