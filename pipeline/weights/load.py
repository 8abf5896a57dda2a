"""Weights on their way into an engine: object refs in, loaded parameters out.

Every train rank puts its own shards as a few large byte buffers (`pipeline/weights/publish.py` is the sending side);
the engine gathers one bucket at a time from all ranks, checks its checksum, joins the rows and hands whole parameters
to vLLM's loader. One bucket is held at a time, so the extra memory is bounded by `trainer.weight_bucket_mb` and not by
the model. The transport is registered as a vLLM weight transfer backend, so the same code serves in-process engines and
tensor-parallel workers.

With `trainer.weight_transport=delta` a shard also says what has changed since the versions before, and an engine that
holds one of these fetches no more (`delta.py`). With `nixl` the buffers stay with the train workers, and an
engine reads them there (`direct.py`).
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.weights.delta import Held, Step
from pipeline.weights.direct import Remote, digest, read

if TYPE_CHECKING:
    import torch

BACKEND = "ray_object_store"


@dataclass(frozen=True)
class Piece:
    """Rows `start:stop` along dimension 0 of one parameter, as bytes `offset:offset + nbytes` of a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    bucket: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Shard:
    """What one rank contributes to a policy version."""

    rank: int
    pieces: list[Piece]
    buckets: list[Any]
    """One object ref, `Remote` or (outside Ray) the buffer itself per bucket."""
    checksums: list[int]
    """`crc` of each bucket."""
    version: int = -1
    """Of the weights; -1 where only whole buckets are published."""
    steps: list[Step] = field(default_factory=list)
    """From the versions before, the oldest first."""
    itemsize: int = 1
    """Bytes of a number."""


def crc(buffer: Any) -> int:
    """The checksum of a bucket: CRC-32, or that of a tensor, which stays on its device."""
    import torch

    return digest(buffer) if isinstance(buffer, torch.Tensor) else zlib.crc32(buffer)


def fetch(refs: list[Any], device: Any, timeout: float) -> list[Any]:
    """Buckets from where they were published: byte buffers, or tensors on `device`.

    Raises:
        TimeoutError: they did not arrive within `timeout` seconds.
    """
    if isinstance(refs[0], Remote):
        return read(refs, device, timeout)
    import ray

    try:
        return ray.get(refs, timeout=timeout) if ray.is_initialized() else refs
    except TimeoutError:
        raise TimeoutError(
            f"weights: a bucket of the {len(refs)} train ranks did not arrive within {timeout:.0f} s "
            "(trainer.deadlines.publish)"
        ) from None


def checksum(shards: Sequence[Shard]) -> int:
    """One number for a whole version: the CRC-32 over all buckets' checksums in rank order."""
    value = 0
    for shard in sorted(shards, key=lambda s: s.rank):
        for crc in shard.checksums:
            value = zlib.crc32(crc.to_bytes(4, "little"), value)
    return value


def parameters(
    shards: Sequence[Shard], fetch: Callable[[list[Any]], list[Any]], held: Held | None = None
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Whole parameters of a version, `(name, tensor)`, one bucket of all ranks at a time.

    Args:
        shards: one per rank; every rank has the same number of buckets with the same parameters in each.
        fetch: turns refs into byte buffers or uint8 tensors, for example `ray.get`.
        held: the buckets that are here, which are brought to this version; None keeps none, and fetches whole ones.

    Raises:
        ValueError: a bucket's bytes do not match its checksum, or a parameter's rows do not add up.
    """
    # Not at the top: the policy store and every worker of the stream's small stages import this module, and torch
    # would cost each of them 100 MiB and a second of CPU at its start.
    import torch

    held = held if min(shard.version for shard in shards) >= 0 else None
    if held:
        held.begin(shards)
    for number in range(len(shards[0].buckets)):
        refs = [shard.buckets[number] for shard in shards]
        buffers = held.take(shards, number, fetch) if held else fetch(refs)
        whole: dict[str, torch.Tensor] = {}
        rows: dict[str, int] = {}
        for shard, buffer in zip(shards, buffers, strict=True):
            if crc(buffer) != shard.checksums[number]:
                raise ValueError(
                    f"weights bucket {number} of train rank {shard.rank} arrived damaged: its checksum does not match "
                    "the published one"
                )
            # Read-only shared memory; the bytes are copied into `whole` below and never written.
            raw = buffer
            if not isinstance(buffer, torch.Tensor):
                raw = torch.frombuffer(memoryview(buffer), dtype=torch.uint8) if len(buffer) else torch.empty(0)
            for piece in (p for p in shard.pieces if p.bucket == number):
                if piece.name not in whole:
                    kind = getattr(torch, piece.dtype)
                    whole[piece.name] = torch.empty(piece.shape, dtype=kind, device=raw.device)
                    rows[piece.name] = 0
                part = raw[piece.offset : piece.offset + piece.nbytes].view(getattr(torch, piece.dtype))
                target = whole[piece.name]
                if piece.shape:
                    target[piece.start : piece.stop] = part.view(piece.stop - piece.start, *piece.shape[1:])
                else:
                    target.copy_(part.view(()))
                rows[piece.name] += piece.stop - piece.start
        for name, tensor in whole.items():
            if rows[name] != (tensor.shape[0] if tensor.dim() else 1):
                raise ValueError(f"parameter {name!r}: the ranks published {rows[name]} of {tensor.shape[0]} rows")
            yield name, tensor
    if held:
        held.done(shards)


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

    if BACKEND in WeightTransferEngineFactory._registry:
        return

    @dataclass
    class Init(WeightTransferInitInfo):
        pass

    @dataclass
    class Update(WeightTransferUpdateInfo):
        shards: list[Shard] = field(default_factory=list)
        timeout: float = 600.0

    class ObjectStoreTransfer(WeightTransferEngine[Init, Update]):
        init_info_cls = Init
        update_info_cls = Update

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._needed: set[str] = set()
            self._held = Held()

        def init_transfer_engine(self, init_info: Init) -> None:
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
            loaded = model.load_weights(parameters(update_info.shards, take, self._held))
            # Whatever is not replaced belongs to another version, and after a sleep to none.
            if loaded is not None and (missing := sorted(self._needed - loaded)):
                raise ValueError(f"the published weights leave {len(missing)} parameters as they were: {missing[:5]}")

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                # A tied head shares the embedding's tensor but keeps its own packed copy for the CPU GEMM; without
                # this it goes on computing logits with the previous version's weights.
                for module in self.model.modules():
                    if isinstance(module, ParallelLMHead):
                        module.quant_method.process_weights_after_loading(module)

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine(BACKEND, ObjectStoreTransfer)
