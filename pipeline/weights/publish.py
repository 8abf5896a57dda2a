"""The trainer's side of the weight sync: each rank puts its part of the weights into the object store.

Every rank copies its block of each parameter into a few large byte buffers (buckets), stores these, and publishes
references to them. Nothing is gathered between ranks. Buckets are filled by the parameters' unsharded sizes, so on
every rank the same bucket has the same parameters, and an engine can load bucket by bucket (`load.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Sharded

from pipeline.models.lora import published
from pipeline.models.state import is_weight, tensors
from pipeline.stats import Stat, Stats
from pipeline.upstream.torch import StridedShard, compute_local_shape_and_global_offset
from pipeline.weights.checksum import crc
from pipeline.weights.direct import ALIGNED, PublishedMemory
from pipeline.weights.load import Piece, Shard

Named = Iterable[tuple[str, torch.Tensor]]
"""(name, tensor) for parameters and buffers."""


def travels_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor of a model is sent to an engine that computes in `dtype`.

    A parameter is sent in `dtype`. A buffer keeps its own dtype, as when it is read from a checkpoint.
    """
    return dtype if is_weight(tensor) else tensor.dtype


def named(model: nn.Module, rename: Callable[[str], str] = str, adapter_alone: bool = False) -> Named:
    """Yield the weights of a model that are published to engines (`lora.published`), unsharded or not.

    Args:
        model: the model.
        rename: turns a name in `model` into the published name.
        adapter_alone: whether to yield only the tensors of the adapter; else these are merged into the base.
    """
    return ((rename(name), parameter) for name, parameter in published(model, adapter_alone))


def local_part(parameter: torch.Tensor, rank: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the block of a parameter that this rank publishes, and the index of the block's first entry per dimension.

    If several ranks have the same block (replicas, tensor-parallel ranks with the same norm), only the first of them
    publishes it; the others return an empty tensor. An unsharded parameter is published by rank 0.

    Raises:
        ValueError: this rank's entries are not a block of neighbouring rows or columns, or they must be summed over
            ranks.
    """
    if not isinstance(parameter, DTensor):
        return parameter if rank == 0 else parameter.new_empty(0), (0,) * parameter.ndim
    mesh, placements, local = parameter.device_mesh, parameter.placements, parameter.to_local()
    # FSDP under tensor parallelism cuts what the later dimension of the mesh has cut: those parts are blocks.
    later: Counter[int] = Counter()
    for size, placement in zip(reversed(mesh.shape), reversed(placements), strict=True):
        if isinstance(placement, StridedShard) and placement.split_factor != (later[placement.dim] or 1):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is sharded as {placements}: a rank's part is not a "
                "block of neighbouring rows or columns, so its weights cannot be published. Tensor parallelism splits "
                "packed projections (gate and up in one) like this; shard the experts instead (actor.parallel.expert) "
                "or set actor.parallel.tensor=1"
            )
        if isinstance(placement, StridedShard | Sharded):
            later[placement.dim] = (later[placement.dim] or 1) * size
        elif not placement.is_replicate():
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is placed as {placements}; only whole numbers can be "
                "published, sharded or replicated"
            )
    shape, start = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    if shape != tuple(local.shape):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)}, sharded as {placements}, has a part of shape "
            f"{tuple(local.shape)} instead of {shape}; its weights cannot be published"
        )
    replicated = [
        c for c, placement in zip(mesh.get_coordinate() or (), placements, strict=True) if placement.is_replicate()
    ]
    # The first rank is in the first of the meshes that hold the same parameter.
    owns = not any(replicated) and bool((mesh.mesh == 0).any())
    return local if owns else local.new_empty(0), start


def buckets(weights: Named, dtype: torch.dtype, limit: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Divide tensors, in order, into groups of at most `limit` bytes. A tensor with more bytes is a group by itself.

    Args:
        weights: the tensors, sharded or not; their unsharded sizes count, in the dtype in which they are sent.
        dtype: the engine's dtype.
        limit: most bytes of a group, over all ranks.
    """
    group: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, parameter in weights:
        nbytes = parameter.numel() * travels_as(parameter, dtype).itemsize
        if group and size + nbytes > limit:
            yield group
            group, size = [], 0
        group.append((name, parameter))
        size += nbytes
    if group:
        yield group


@torch.no_grad()
def pack(
    weights: Named,
    rank: int,
    dtype: torch.dtype,
    limit: int,
    put: Callable[[Any], Any],
    memory: "PublishedMemory | Staging | None" = None,
    adapter: Mapping[str, Any] | None = None,
) -> Shard:
    """Pack this rank's part of the current weights.

    While a bucket is filled, another thread computes the checksum of the previous bucket and stores it.

    Args:
        weights: tensors, sharded or not, under the published names, the same on every rank.
        rank: rank of this process.
        dtype: the engine's dtype, in which parameters are sent.
        limit: most bytes of a bucket over all ranks (`trainer.weight_bucket_mb`).
        put: stores a bucket, a uint8 numpy array, and returns a reference to it; for example `ray.put`. With
            `PublishedMemory` it gets the bucket as a tensor.
        memory: provides the memory of buckets; None allocates new memory for every bucket.
        adapter: settings of the adapter if `weights` are an adapter's; None for a whole model.
    """
    pieces: list[Piece] = []
    stored: list[Future[tuple[int, Any]]] = []

    def store(data: Any) -> tuple[int, Any]:
        # On a GPU this also waits until the bytes are written.
        return crc(data), put(data)

    # An error in between waits for what is being stored.
    with ThreadPoolExecutor(1, "publish") as pool:
        for number, group in enumerate(buckets(weights, dtype, limit)):
            if number > 1:
                # The memory of the bucket before last is written again.
                stored[number - 2].result()
            parts = [(*local_part(tensor, rank), travels_as(tensor, dtype)) for _, tensor in group]
            offsets, size = _places(parts)
            buffer = memory.empty(size) if memory else torch.empty(size, dtype=torch.uint8)
            for (name, whole), (part, start, kind), offset in zip(group, parts, offsets, strict=True):
                nbytes = part.numel() * kind.itemsize
                buffer[offset : offset + nbytes].view(kind).view(part.shape).copy_(part)
                if nbytes:
                    place = (tuple(whole.shape), start, tuple(part.shape), number, offset, nbytes)
                    pieces.append(Piece(name, *place, str(kind).removeprefix("torch.")))
            stored.append(pool.submit(store, buffer if isinstance(memory, PublishedMemory) else buffer.numpy()))
    found = [future.result() for future in stored]
    refs, checksums = [ref for _, ref in found], [checksum for checksum, _ in found]
    return Shard(rank, pieces, refs, checksums, adapter=adapter)


def _places(parts: Sequence[tuple[torch.Tensor, tuple[int, ...], torch.dtype]]) -> tuple[list[int], int]:
    """Return the byte offset of each of a rank's parts in a bucket, and the number of bytes of the bucket.

    Parts with large entries come first (8 bytes, then 4, ...), so that every part is aligned.
    """
    offsets, size = [0] * len(parts), 0
    for index in sorted(range(len(parts)), key=lambda index: -parts[index][2].itemsize):
        part, _, kind = parts[index]
        offsets[index] = size
        size += part.numel() * kind.itemsize
    return offsets, size


def held_bytes(model: nn.Module, rank: int, dtype: torch.dtype, limit: int, adapter_alone: bool = False) -> int:
    """Return the number of bytes of all buckets that `pack` fills on this rank, each rounded up to a multiple of
    `ALIGNED`. Arguments are as in `pack` and `named`."""
    held = ((name, tensor) for name, tensor in tensors(model) if (".lora_" in name) == adapter_alone)
    total = 0
    for group in buckets(held, dtype, limit):
        _, size = _places([(*local_part(tensor, rank), travels_as(tensor, dtype)) for _, tensor in group])
        total += -(-size // ALIGNED) * ALIGNED
    return total


class Staging:
    """Reusable host memory for buckets, since the first write to new memory takes longer than the copy itself.

    Two buckets take turns. The `put` of `pack` must have copied a bucket when it returns.
    """

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2

    def empty(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8, memory for the next bucket."""
        self._buffers.reverse()
        if len(self._buffers[0]) < nbytes:
            self._buffers[0] = torch.empty(nbytes, dtype=torch.uint8)
        return self._buffers[0][:nbytes]


class WeightPublisher:
    """Publisher of one rank's part of one model's weights, version after version.

    Args:
        rank, dtype, limit, adapter: as in `pack`.
        put: stores a copy of a bucket, a uint8 numpy array, and returns a reference to it; for example `ray.put`.
        rename: turns the name of a parameter into the published name.
        memory: stores the buckets for reads by NIXL, in place of `put`.
    """

    def __init__(
        self,
        rank: int,
        dtype: torch.dtype,
        limit: int,
        put: Callable[[Any], Any],
        rename: Callable[[str], str] = str,
        memory: PublishedMemory | None = None,
        adapter: Mapping[str, Any] | None = None,
    ) -> None:
        self._args, self._adapter = (rank, dtype, limit), adapter
        self._put: Callable[[Any], Any] = memory.put if memory else put
        self._rename, self._memory = rename, memory or Staging()
        self.bytes = 0
        """Number of bytes of this rank's buckets of the last version."""

    def stats(self) -> Stats:
        """Return the metric `perf/weight_bytes` of the last version."""
        return {"perf/weight_bytes": Stat("sum", (float(self.bytes),))}

    def pack(self, model: nn.Module, version: int) -> Shard:
        """Pack this rank's part of the current weights of `model`, which are policy version `version`."""
        self.bytes = 0

        def put(buffer: Any) -> Any:
            self.bytes += len(buffer)
            return self._put(buffer)

        if isinstance(self._memory, PublishedMemory):
            self._memory.begin(version, held_bytes(model, *self._args, self._adapter is not None))
        weights = named(model, self._rename, self._adapter is not None)
        return pack(weights, *self._args, put, self._memory, self._adapter)
