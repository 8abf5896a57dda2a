"""The trainer's side of the weight sync: each rank puts its part of the weights into the object store.

Every rank copies its block of each parameter into a few large byte buffers (buckets), stores these, and publishes
references to them. Nothing is gathered between ranks. Buckets are filled by the parameters' unsharded sizes, so on
every rank the same bucket has the same parameters, and an engine can load bucket by bucket (`load.py`).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Sharded

from pipeline.models.lora import is_adapted, published
from pipeline.models.mesh import Mesh
from pipeline.models.state import is_weight, tensors
from pipeline.stats import Stat, Stats
from pipeline.upstream.torch import StridedShard, compute_local_shape_and_global_offset
from pipeline.weights.checksum import crc
from pipeline.weights.direct import ALIGNED, PublishedMemory
from pipeline.weights.load import Piece, Shard

NOTHING = torch.empty(0)


@dataclass(frozen=True)
class WeightPart:
    """This rank's part of a tensor."""

    name: str
    """Published name."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    """Type in which the tensor is sent."""
    block: torch.Tensor = NOTHING
    """A block of neighbouring rows or columns; without entries if this rank publishes nothing of the tensor."""
    start: tuple[int, ...] = ()
    """Index of the block's first entry in the whole tensor."""

    @property
    def whole_bytes(self) -> int:
        """Number of bytes of the whole tensor, over all ranks."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Number of bytes of the block."""
        return self.block.numel() * self.dtype.itemsize


def travels_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor of a model is sent to an engine that computes in `dtype`.

    A parameter is sent in `dtype`. A buffer keeps its own dtype, as when it is read from a checkpoint.
    """
    return dtype if is_weight(tensor) else tensor.dtype


def parts(
    model: nn.Module,
    rank: int,
    dtype: torch.dtype,
    rename: Callable[[str], str] = str,
    adapter_alone: bool = False,
    first: int = 0,
) -> Iterator[WeightPart]:
    """Yield this rank's parts of the tensors that are published to engines (`lora.published`), without a collective
    unless the model has adapters.

    Args:
        model: sharded or not; the same tensors on every rank, or on every rank of a stage.
        rank: rank of this process.
        dtype: the engine's dtype.
        rename: turns a name in `model` into the published name.
        adapter_alone: whether to yield only the tensors of the adapter; else these are merged into the base.
        first: first rank that has the model; above 0 for later stages of a pipeline.
    """
    if own := getattr(model, "parts", None):
        made: Iterator[WeightPart] = own(rank, dtype)
        return made
    return (_part(rename(name), tensor, rank, dtype, first) for name, tensor in published(model, adapter_alone))


def _part(name: str, tensor: torch.Tensor, rank: int, dtype: torch.dtype, first: int) -> WeightPart:
    return WeightPart(name, tuple(tensor.shape), travels_as(tensor, dtype), *local_part(tensor, rank, first))


def local_part(parameter: torch.Tensor, rank: int, first: int = 0) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the block of a parameter that this rank publishes, and the index of the block's first entry per dimension.

    If several ranks have the same block (replicas, tensor-parallel ranks with the same norm), only the first of them
    publishes it; the others return an empty tensor. An unsharded parameter is published by the rank `first`.

    Raises:
        ValueError: this rank's entries are not a block of neighbouring rows or columns, or they must be summed over
            ranks.
    """
    if not isinstance(parameter, DTensor):
        return parameter if rank == first else parameter.new_empty(0), (0,) * parameter.ndim
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
    owns = not any(replicated) and bool((mesh.mesh == first).any())
    return local if owns else local.new_empty(0), start


def buckets(weights: Iterable[WeightPart], limit: int) -> Iterator[list[WeightPart]]:
    """Divide tensors, in order, into groups of at most `limit` bytes. A tensor with more bytes is a group by itself.

    Args:
        weights: parts of the tensors; the sizes of the whole tensors count.
        limit: most bytes of a group, over all ranks.
    """
    group: list[WeightPart] = []
    size = 0
    for part in weights:
        if group and size + part.whole_bytes > limit:
            yield group
            group, size = [], 0
        group.append(part)
        size += part.whole_bytes
    if group:
        yield group


@torch.no_grad()
def pack(
    weights: Iterable[WeightPart],
    rank: int,
    limit: int,
    put: Callable[[Any], Any],
    memory: "PublishedMemory | Staging | None" = None,
    adapter: Mapping[str, Any] | None = None,
) -> Shard:
    """Pack this rank's part of the current weights.

    While a bucket is filled, another thread computes the checksum of the previous bucket and stores it.

    Args:
        weights: this rank's parts of all tensors, in the same order on every rank.
        rank: rank of this process.
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
        for number, group in enumerate(buckets(weights, limit)):
            if number > 1:
                # The memory of the bucket before last is written again.
                stored[number - 2].result()
            offsets, size = _places(group)
            buffer = memory.empty(size) if memory else torch.empty(size, dtype=torch.uint8)
            for part, offset in zip(group, offsets, strict=True):
                block = part.block
                buffer[offset : offset + part.nbytes].view(part.dtype).view(block.shape).copy_(block)
                if part.nbytes:
                    place = (part.shape, part.start, tuple(block.shape), number, offset, part.nbytes)
                    pieces.append(Piece(part.name, *place, str(part.dtype).removeprefix("torch.")))
            stored.append(pool.submit(store, buffer if isinstance(memory, PublishedMemory) else buffer.numpy()))
    found = [future.result() for future in stored]
    refs, checksums = [ref for _, ref in found], [checksum for checksum, _ in found]
    return Shard(rank, pieces, refs, checksums, adapter=adapter)


def _places(group: Sequence[WeightPart]) -> tuple[list[int], int]:
    """Return the byte offset of each of a rank's parts in a bucket, and the number of bytes of the bucket.

    Parts with large entries come first (8 bytes, then 4, ...), so that every part is aligned.
    """
    offsets, size = [0] * len(group), 0
    for index in sorted(range(len(group)), key=lambda index: -group[index].dtype.itemsize):
        offsets[index] = size
        size += group[index].nbytes
    return offsets, size


def held_bytes(weights: Iterable[WeightPart], limit: int) -> int:
    """Return the number of bytes of all buckets that `pack` fills on this rank, each rounded up to a multiple of
    `ALIGNED`. Arguments are as in `pack`."""
    return sum(-(-_places(group)[1] // ALIGNED) * ALIGNED for group in buckets(weights, limit))


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
        rank, limit, adapter: as in `pack`.
        dtype: the engine's dtype, in which parameters are sent.
        put: stores a copy of a bucket, a uint8 numpy array, and returns a reference to it; for example `ray.put`.
        rename: turns the name of a parameter into the published name.
        memory: stores the buckets for reads by NIXL, in place of `put`.
        mesh: the ranks of the model, if it may be a stage of a pipeline.
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
        mesh: Mesh | None = None,
    ) -> None:
        self._rank, self._dtype, self._limit, self._adapter = rank, dtype, limit, adapter
        self._mesh = mesh
        self._stages: list[list[WeightPart]] | None = None
        """Parts without blocks of each stage's tensors, once they are known."""
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

        alone, first = self._adapter is not None, self._mesh.first_rank if self._mesh else 0

        def own() -> Iterable[WeightPart]:
            return parts(model, self._rank, self._dtype, self._rename, alone, first)

        def unmerged() -> Iterable[WeightPart]:
            for name, tensor in tensors(model):
                if (".lora_" in name) == alone:
                    yield _part(name, tensor, self._rank, self._dtype, first)

        if isinstance(self._memory, PublishedMemory):
            # Merged weights have the sizes of the base's, and need not be computed here.
            held = unmerged if is_adapted(model) else own
            self._memory.begin(version, held_bytes(self._in_all_stages(held), self._limit))
        return pack(self._in_all_stages(own), self._rank, self._limit, put, self._memory, self._adapter)

    def _in_all_stages(self, own: Callable[[], Iterable[WeightPart]]) -> Iterable[WeightPart]:
        """Return the parts of this rank's stage, which `own` makes one by one, with empty parts of all tensors of the
        other stages around them, so that buckets are the same on every rank. A collective at the first call."""
        if self._mesh is None or (stage := self._mesh.stage).count == 1:
            return own()
        if self._stages is None:
            self._stages = [[]] * stage.count
            empty = [replace(part, block=NOTHING, start=()) for part in own()]
            dist.all_gather_object(self._stages, empty, group=stage.group)
        before, after = self._stages[: stage.number], self._stages[stage.number + 1 :]
        return chain(*before, own(), *after)
