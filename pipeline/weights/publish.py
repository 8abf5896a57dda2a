"""The trainer's side of the weight broadcast: each rank puts its shards into the object store and publishes the refs.

Every rank copies the rows it holds of each parameter into a few large byte buffers and puts those; nothing is gathered
between ranks. Buckets are cut by the parameters' whole sizes, so every rank has the same parameters in the same bucket
and an engine can load bucket by bucket (`load.py`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Sharded
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from pipeline.models.lora import published
from pipeline.stats import Stat, Stats, mean
from pipeline.weights.delta import MAX_STEPS, encode
from pipeline.weights.direct import PublishedMemory
from pipeline.weights.load import Piece, Shard, Step, crc


def local_part(parameter: torch.Tensor, rank: int) -> tuple[torch.Tensor, int]:
    """This rank's rows of a parameter and the index of their first number in the flattened parameter.

    An unsharded parameter belongs to rank 0 alone.

    Raises:
        ValueError: the parameter is sharded along another dimension than the first.
    """
    if not isinstance(parameter, DTensor):
        return parameter if rank == 0 else parameter.new_empty(0), 0
    if any(isinstance(p, Sharded) and p.dim != 0 for p in parameter.placements):
        raise ValueError(f"a parameter is sharded as {parameter.placements}; only rows (Shard(0)) can be broadcast")
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    first_row = offset[0] if offset else 0
    return parameter.to_local(), first_row * math.prod(parameter.shape[1:])


def buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, limit: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Parameters in order, in groups of at most `limit` bytes as `dtype`; a larger one is a group of its own."""
    group: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, parameter in tensors:
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
    memory: PublishedMemory | None = None,
    adapter: Mapping[str, Any] | None = None,
) -> Shard:
    """This rank's part of the current weights.

    Args:
        model: sharded along dimension 0, or not at all.
        rank: rank of this process.
        dtype: type the weights travel in; the engine's.
        limit: bytes of a bucket over all ranks (`trainer.weight_bucket_mb`).
        put: stores a uint8 numpy array and returns what fetches it; `ray.put`.
        rename: turns a parameter's name into the engine's.
        memory: where the buckets are written, as uint8 tensors that `put` then gets.
        adapter: settings of the model's adapter, which then travels alone; None: whole weights, adapters merged.
    """
    shard = Shard(rank, [], [], [], str(dtype).removeprefix("torch."), adapter=adapter)
    for number, group in enumerate(buckets(published(model, adapter is not None), dtype, limit)):
        parts = [(rename(name), tuple(parameter.shape), *local_part(parameter, rank)) for name, parameter in group]
        size = sum(part.numel() for _, _, part, _ in parts) * dtype.itemsize
        buffer = memory.empty(size) if memory else torch.empty(size, dtype=torch.uint8)
        offset = 0
        for name, shape, part, start in parts:
            nbytes = part.numel() * dtype.itemsize
            buffer[offset : offset + nbytes].view(dtype).copy_(part.reshape(-1))
            if nbytes:
                shard.pieces.append(Piece(name, shape, start, number, offset, nbytes))
            offset += nbytes
        data: Any = buffer if memory else buffer.numpy()
        # On a GPU this also waits until the bytes are written.
        shard.checksums.append(crc(data))
        shard.buckets.append(put(data))
    return shard


class WeightPublisher:
    """Publishes one rank's weights of one model, version after version.

    Args:
        rank, dtype, limit, put, rename: see `pack`.
        delta: also publish the changes since earlier versions (`delta.py`); this keeps the last version's buckets.
        memory: stores the buckets, in place of `put`.
        adapter: see `pack`.
    """

    def __init__(
        self,
        rank: int,
        dtype: torch.dtype,
        limit: int,
        put: Callable[[Any], Any],
        rename: Callable[[str], str] = str,
        delta: bool = False,
        memory: PublishedMemory | None = None,
        adapter: Mapping[str, Any] | None = None,
    ) -> None:
        self._args, self._adapter = (rank, dtype, limit), adapter
        self._put: Callable[[Any], Any] = memory.put if memory else put
        self._rename, self._delta, self._memory = rename, delta, memory
        self._version = -1
        self._kept: list[np.ndarray] = []
        self._steps: list[Step] = []
        self.whole_bytes = 0
        """Size of the last version's buckets."""
        self.bytes = 0
        """Bytes that an engine fetches if it has the version before."""

    def stats(self) -> Stats:
        """Metrics of the last version."""
        fetched, whole = float(self.bytes), float(self.whole_bytes)
        return {"perf/weight_bytes": Stat("sum", (fetched,)), "perf/weight_bytes_ratio": mean(fetched, whole)}

    def pack(self, model: nn.Module, version: int) -> Shard:
        """This rank's part of the current weights, which are those of `version`."""
        buffers: list[Any] = []

        def put(buffer: Any) -> Any:
            buffers.append(buffer)
            return self._put(buffer)

        if self._memory:
            rank, dtype, _ = self._args
            base = (parameter for name, parameter in model.named_parameters() if ".lora_" not in name)
            numbers = sum(local_part(parameter, rank)[0].numel() for parameter in base)
            self._memory.begin(version, numbers * dtype.itemsize)
        shard = pack(model, *self._args, put, self._rename, self._memory, self._adapter)
        self.whole_bytes = self.bytes = sum(map(len, buffers))
        if not self._delta:
            return shard
        if version == self._version + 1 and [len(b) for b in buffers] == [len(b) for b in self._kept]:
            changes = [
                encode(old, new, shard.spans(number), shard.itemsize)
                for number, (old, new) in enumerate(zip(self._kept, buffers, strict=True))
            ]
            self.bytes = min(sum(map(len, changes)), self.whole_bytes)
            self._steps.append(Step(self._version, [self._put(change) for change in changes], self.bytes))
        else:
            self._steps.clear()
        # Steps that are as long together as the whole save nothing.
        while self._steps and (
            len(self._steps) > MAX_STEPS or sum(step.nbytes for step in self._steps) >= self.whole_bytes
        ):
            del self._steps[0]
        self._version, self._kept = version, buffers
        return replace(shard, version=version, steps=list(self._steps))
