"""The engine's side of the weight broadcast: object refs in, whole parameters out.

Every train rank publishes its own shards as a few large byte buffers (`publish.py`). The receiver gathers one bucket at
a time from all ranks, verifies its checksum and joins whole parameters, so the extra memory is bounded by
`trainer.weight_bucket_mb` and not by the model. `register` makes this a vLLM weight transfer backend, for in-process
engines and tensor-parallel workers.

With `trainer.weight_transport=delta` a shard also holds what has changed since earlier versions (`delta.py`). With
`nixl` the buffers stay with the train workers, and an engine reads them there (`direct.py`).
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.weights.delta import BucketCache, Span
from pipeline.weights.direct import RemoteBuffer, digest, read

if TYPE_CHECKING:
    import torch

BACKEND = "ray_object_store"


@dataclass(frozen=True)
class Piece:
    """Part of one parameter, as bytes `offset:offset + nbytes` of a bucket."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """Index of the part's first number in the flattened parameter."""
    bucket: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Step:
    """What one rank changed from version `since` to the next."""

    since: int
    buckets: list[Any]
    """As of `Shard`: the changes of each bucket."""
    nbytes: int


@dataclass(frozen=True)
class Shard:
    """What one rank contributes to a policy version."""

    rank: int
    pieces: list[Piece]
    buckets: list[Any]
    """One object ref, `RemoteBuffer` or (outside Ray) the buffer itself per bucket."""
    checksums: list[int]
    """`crc` of each bucket."""
    dtype: str = "float32"
    """Of all numbers, as torch calls it."""
    version: int = -1
    """Of the weights; -1 where only whole buckets are published."""
    steps: list[Step] = field(default_factory=list)
    """From earlier versions, the oldest first."""
    adapter: Mapping[str, Any] | None = None
    """Settings of the adapter (`pipeline/models/adapter.py`) that these tensors are; None: they are a whole model."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        import torch

        return int(getattr(torch, self.dtype).itemsize)

    def spans(self, number: int) -> list[Span]:
        """Where the pieces of a bucket are in it."""
        return [(piece.offset, piece.nbytes) for piece in self.pieces if piece.bucket == number]


def crc(buffer: Any) -> int:
    """The checksum of a bucket: CRC-32 of host memory, `digest` of a tensor, which stays on its device."""
    import torch

    return digest(buffer) if isinstance(buffer, torch.Tensor) else zlib.crc32(buffer)


def checksum(shards: Sequence[Shard]) -> int:
    """One number for a whole version: the CRC-32 over all buckets' checksums in rank order."""
    ordered = sorted(shards, key=lambda shard: shard.rank)
    return zlib.crc32(b"".join(crc.to_bytes(4, "little") for shard in ordered for crc in shard.checksums))


def fetch(refs: list[Any], device: Any, timeout: float) -> list[Any]:
    """Buckets from where they were published: byte buffers, or tensors on `device`.

    Raises:
        TimeoutError: they did not arrive within `timeout` seconds.
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
    shards: Sequence[Shard], fetch: Callable[[list[Any]], list[Any]], cache: BucketCache | None = None
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Whole parameters of a version, `(name, tensor)`, one bucket of all ranks at a time.

    Args:
        shards: one per rank; every rank has the same number of buckets with the same parameters in each.
        fetch: turns refs into byte buffers or uint8 tensors, for example `ray.get`.
        cache: the buckets that are here, which are brought to this version; None fetches whole ones.

    Raises:
        ValueError: a bucket's bytes do not match its checksum, or the parts of a parameter do not add up.
    """
    # Not at the top: the policy store and every worker of the stream's small stages import this module, and torch
    # would cost each of them 100 MiB and a second of CPU at its start.
    import torch

    dtype = getattr(torch, shards[0].dtype)
    if min(shard.version for shard in shards) < 0:
        cache = None
    if cache:
        cache.begin(shards)
    for number in range(len(shards[0].buckets)):
        buffers = cache.take(shards, number, fetch) if cache else fetch([shard.buckets[number] for shard in shards])
        joined: dict[str, torch.Tensor] = {}
        counts: dict[str, int] = {}
        for shard, buffer in zip(shards, buffers, strict=True):
            if crc(buffer) != shard.checksums[number]:
                raise ValueError(
                    f"weights bucket {number} of train rank {shard.rank} arrived damaged: its checksum does not match "
                    "the published one"
                )
            for piece in (piece for piece in shard.pieces if piece.bucket == number):
                if isinstance(buffer, torch.Tensor):
                    part = buffer[piece.offset : piece.offset + piece.nbytes].view(dtype)
                else:
                    # Read-only shared memory, from which is copied.
                    count = piece.nbytes // dtype.itemsize
                    part = torch.frombuffer(buffer, dtype=dtype, count=count, offset=piece.offset)
                if piece.name not in joined:
                    joined[piece.name] = torch.empty(piece.shape, dtype=dtype, device=part.device)
                    counts[piece.name] = 0
                joined[piece.name].view(-1)[piece.start : piece.start + len(part)] = part
                counts[piece.name] += len(part)
        for name, tensor in joined.items():
            if counts[name] != tensor.numel():
                raise ValueError(f"parameter {name!r}: the ranks published {counts[name]} of {tensor.numel()} numbers")
            yield name, tensor
    if cache:
        cache.done(shards)


def register() -> None:
    """Make the transport known to vLLM in this process (also called in every vLLM process by the entry point)."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class Update(WeightTransferUpdateInfo):
        shards: list[Shard] = field(default_factory=list)
        timeout: float = 600.0

    class ObjectStoreTransfer(WeightTransferEngine[WeightTransferInitInfo, Update]):
        init_info_cls = WeightTransferInitInfo
        update_info_cls = Update

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._needed: set[str] = set()
            self._cache = BucketCache()

        def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
            pass

        def start_weight_update(self) -> None:
            if not self._needed:
                # Tied parameters are one until an update fails half way.
                self._needed.update(name for name, _ in self.model.named_parameters())
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Update) -> None:
            def take(refs: list[Any]) -> list[Any]:
                return fetch(refs, self.device, update_info.timeout)

            model: Any = self.model
            loaded = model.load_weights(parameters(update_info.shards, take, self._cache))
            # Whatever is not replaced belongs to another version, and after a sleep to none.
            if loaded is not None and (missing := sorted(self._needed - loaded)):
                raise ValueError(f"the published weights leave {len(missing)} parameters as they were: {missing[:5]}")

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                # A tied head shares the embedding's tensor but keeps its own packed copy for the CPU GEMM; without
                # this it keeps computing logits with the previous version's weights.
                for module in self.model.modules():
                    if isinstance(module, ParallelLMHead):
                        module.quant_method.process_weights_after_loading(module)

        def shutdown(self) -> None:
            pass

    # Registered before in this process.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, ObjectStoreTransfer)
