"""The engine's side of the weight sync: fetches published buckets and joins them to whole parameters.

Every train rank publishes its part of the weights as a few large byte buffers, the buckets (`publish.py`). The receiver
fetches one bucket at a time from all ranks, verifies checksums, and joins whole parameters. So the extra memory is
bounded by `trainer.weight_bucket_mb`, not by the size of the model. `rollout/engines/vllm/transfer.py` makes this a
weight transfer backend of vLLM. Scoring replicas use `parameters` directly.

With `trainer.weight_transport=nixl` the buckets stay in the memory of train workers, and an engine reads them there
(`direct.py`).
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.weights.checksum import crc
from pipeline.weights.direct import RemoteBuffer, read

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Piece:
    """A block of one parameter, in the bytes `offset:offset + nbytes` of a bucket."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: tuple[int, ...]
    """Index of the block's first entry in the whole parameter, per dimension."""
    extent: tuple[int, ...]
    """Shape of the block."""
    bucket: int
    """Number of the bucket, from 0."""
    offset: int
    """First byte in the bucket."""
    nbytes: int
    """Number of bytes."""
    dtype: str = "float32"
    """Name of torch's dtype."""

    @property
    def itemsize(self) -> int:
        """Number of bytes of an entry."""
        import torch

        return int(getattr(torch, self.dtype).itemsize)

    @property
    def place(self) -> tuple[slice, ...]:
        """Index of the block in the whole parameter, one slice per dimension."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.extent, strict=True))


@dataclass(frozen=True)
class Shard:
    """The part of one model's weights, in one version, that one train rank published."""

    rank: int
    pieces: list[Piece]
    """The blocks of parameters in all buckets."""
    buckets: list[Any]
    """For each bucket an object ref, a `RemoteBuffer`, or (outside Ray) the buffer itself."""
    checksums: list[int]
    """`crc` of each bucket."""
    adapter: Mapping[str, Any] | None = None
    """Settings of the adapter (`pipeline/models/adapter.py`) if the tensors are an adapter's; None for a whole
    model."""


def checksum(shards: Sequence[Shard]) -> int:
    """Return one checksum for a version's weights of one model: the CRC-32 of all bucket checksums, in rank order."""
    ordered = sorted(shards, key=lambda shard: shard.rank)
    return zlib.crc32(b"".join(crc.to_bytes(4, "little") for shard in ordered for crc in shard.checksums))


def fetch(refs: list[Any], device: Any, timeout: float) -> list[Any]:
    """Fetch published buckets: host memory, or, with NIXL, tensors on `device`.

    Args:
        refs: entries of `Shard.buckets`, all of the same kind.
        device: device to read to with NIXL.
        timeout: seconds that all together may take.

    Raises:
        TimeoutError: the buckets did not arrive in time.
    """
    if isinstance(refs[0], RemoteBuffer):
        return read(refs, device, timeout)
    import ray

    try:
        return ray.get(refs, timeout=timeout) if ray.is_initialized() else refs
    except TimeoutError:
        raise TimeoutError(
            f"weights: a bucket of the {len(refs)} train ranks did not arrive within {timeout:.0f} s "
            "(trainer.deadlines.publish)"
        ) from None


def parameters(
    shards: Sequence[Shard], fetch: Callable[[list[Any]], list[Any]]
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yield the whole parameters of a version, `(name, tensor)`, bucket by bucket.

    While the caller works on a bucket, the next one is fetched and verified (not with NIXL). If one rank published a
    whole tensor, it is not copied, and it may be read-only.

    Args:
        shards: one per rank; every rank has the same number of buckets, with the same parameters in each.
        fetch: turns entries of `Shard.buckets` into byte buffers or uint8 tensors, for example `ray.get`.

    Raises:
        ValueError: a bucket does not match its checksum, or the blocks of a parameter do not add up to the whole.
    """
    count = len(shards[0].buckets)

    def arrive(number: int) -> list[Any]:
        buffers = fetch([shard.buckets[number] for shard in shards])
        for shard, buffer in zip(shards, buffers, strict=True):
            if crc(buffer) != shard.checksums[number]:
                raise ValueError(
                    f"weights bucket {number} of train rank {shard.rank} arrived damaged: its checksum does not match "
                    "the published one"
                )
        return buffers

    parts: list[dict[str, list[tuple[int, Piece]]]] = [{} for _ in range(count)]
    for index, shard in enumerate(shards):
        for piece in shard.pieces:
            parts[piece.bucket].setdefault(piece.name, []).append((index, piece))
    # A one-sided read would overwrite device memory that is free, but that queued work still reads.
    direct = count and isinstance(shards[0].buckets[0], RemoteBuffer)
    arrived = map(arrive, range(count)) if direct else _ahead(arrive, count)
    for buffers, named in zip(arrived, parts, strict=True):
        # One after the other: memory of a parameter that the caller has dropped serves the next one.
        for name, found in named.items():
            yield name, _joined(name, [(piece, _numbers(buffers[index], piece)) for index, piece in found])


def _numbers(buffer: Any, piece: Piece) -> "torch.Tensor":
    """Return the block `piece` in a bucket as a tensor of its shape and dtype, without a copy."""
    # Not at the top: the policy store and every worker of the stream's small stages import this module, and torch
    # would cost each of them 100 MiB and a second of CPU at its start.
    import torch

    dtype = getattr(torch, piece.dtype)
    if isinstance(buffer, torch.Tensor):
        return buffer[piece.offset : piece.offset + piece.nbytes].view(dtype).view(piece.extent)
    # Read-only shared memory.
    count = piece.nbytes // piece.itemsize
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=piece.offset).view(piece.extent)


def _joined(name: str, parts: list[tuple[Piece, "torch.Tensor"]]) -> "torch.Tensor":
    """Join a parameter from its blocks. Raises ValueError if entries are missing."""
    import torch

    piece, whole = parts[0]
    if piece.extent != piece.shape:
        whole = torch.empty(piece.shape, dtype=whole.dtype, device=whole.device)
        for piece, part in parts:
            whole[piece.place] = part
    if (count := sum(part.numel() for _, part in parts)) != whole.numel():
        raise ValueError(f"parameter {name!r}: the ranks published {count} of {whole.numel()} numbers")
    return whole


def _ahead(work: Callable[[int], Any], count: int) -> Iterator[Any]:
    """Yield `work(0)`, ..., `work(count - 1)`. A thread computes the next result while the caller uses the last one."""
    with ThreadPoolExecutor(1, "weights") as pool:
        pending = pool.submit(work, 0) if count else None
        for following in range(1, count + 1):
            assert pending is not None
            done = pending.result()
            pending = pool.submit(work, following) if following < count else None
            yield done


def copy_into(targets: Mapping[str, "torch.Tensor"], shards: Sequence[Shard], timeout: float, published: str) -> None:
    """Write the published weights of a model into tensors, in place.

    Args:
        targets: all tensors of the model, by their published names.
        shards: the published weights.
        timeout: seconds in which they must arrive.
        published: words for the weights, for errors.

    Raises:
        TimeoutError: a bucket did not arrive in time.
        ValueError: the weights arrived damaged, or belong to another model.
    """
    device = next(iter(targets.values())).device
    missing = set(targets)
    for name, tensor in parameters(shards, lambda refs: fetch(refs, device, timeout)):
        target = targets.get(name)
        if target is None or target.shape != tensor.shape:
            here = "does not know" if target is None else f"has with shape {tuple(target.shape)}"
            raise ValueError(
                f"{published} holds {name!r} with shape {tuple(tensor.shape)}, which this replica {here}; it must "
                "load the model that is trained"
            )
        target.copy_(tensor)
        missing.discard(name)
    if missing:
        raise ValueError(
            f"{published} lacks {len(missing)} of {len(targets)} tensors: {', '.join(sorted(missing))}; the train "
            "workers must publish all of them"
        )
