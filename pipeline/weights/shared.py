"""Weights through shared memory to an engine in another process, on the same machine.

    writer (the rollout actor)                      reader (the engine's process)
    fill a buffer ──► its manifest, in a request ──► map the buffer, load it into the model
    read the report ◄── the engine's answer ◄─────── write a report to the head of the buffer

A buffer is anonymous memory, which the reader opens by the path of the writer's file descriptor. It has no name, so
nothing is left of it. Two buffers take turns, and are used again for each version, because fresh memory is slow: the
first access to each page costs more than the copy.
"""

import contextlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.errors import FinalError, short_reason

if TYPE_CHECKING:
    import torch

    from pipeline.weights.confirm import Watch

HEAD = 1 << 20
"""Bytes at the beginning of a buffer for the reader's report."""
ALIGNMENT = 64


@dataclass
class Manifest:
    """Content of a buffer, for the reader."""

    path: str
    tensors: list[tuple[str, str, list[int], int]]
    """(Name, torch's dtype, shape, first byte) of each tensor."""
    check: bool
    """True to follow the tensors of this version into the model (`weights/confirm.py`)."""
    first: bool
    """True for the first buffer of a version."""

    def encode(self) -> bytes:
        """Return the manifest as JSON."""
        return json.dumps(asdict(self)).encode()


@dataclass
class Report:
    """The reader's answer to a manifest."""

    error: str = ""
    """The reason why the tensors could not be loaded; "" if they were."""
    final: bool = False
    """True if the error would occur again."""
    unread: list[str] = field(default_factory=list)
    """Names of tensors of the version, up to now, that the engine's loader did not read, with `Manifest.check`."""
    left: list[str] = field(default_factory=list)
    """Names of the engine's parameters to which nothing was written up to now, with `Manifest.check`."""


class SharedBuffer:
    """Shared memory for the tensors of one request; it grows if a tensor needs more."""

    def __init__(self, size: int) -> None:
        self._fd = os.memfd_create("slipstream-weights")
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self._memory: mmap.mmap | None = None
        self.size = 0
        self.grow(size)

    def grow(self, size: int) -> None:
        """Make room for `size` bytes of tensors, which are lost."""
        if size > self.size:
            os.ftruncate(self._fd, HEAD + size)
            self._memory, self.size = mmap.mmap(self._fd, HEAD + size), size

    def write(self, weights: "Iterable[tuple[str, torch.Tensor]]", check: bool, first: bool) -> Manifest:
        """Copy tensors into the buffer, which is large enough; returns the manifest."""
        import torch

        assert self._memory is not None
        self._memory[:8] = (0).to_bytes(8, "little")
        found: list[tuple[str, str, list[int], int]] = []
        offset = HEAD
        for name, tensor in weights:
            place = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            place.view(tensor.shape).copy_(tensor)
            found.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset))
            offset += aligned(tensor)
        return Manifest(self.path, found, check, first)

    def report(self) -> Report | None:
        """Return the reader's report on the last manifest; None if there is none."""
        assert self._memory is not None
        length = int.from_bytes(self._memory[:8], "little")
        return Report(**json.loads(self._memory[8 : 8 + length])) if length else None

    def close(self) -> None:
        """Free the memory."""
        self._memory = None
        os.close(self._fd)


def aligned(tensor: "torch.Tensor") -> int:
    """Return the number of bytes that a tensor takes in a buffer."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def buckets(weights: "Iterable[tuple[str, torch.Tensor]]", size: int) -> "Iterator[list[tuple[str, torch.Tensor]]]":
    """Yield the weights in lists of at most `size` bytes; a larger tensor has a list of its own."""
    found: list[tuple[str, torch.Tensor]] = []
    used = 0
    for name, tensor in weights:
        if found and used + aligned(tensor) > size:
            yield found
            found, used = [], 0
        found.append((name, tensor))
        used += aligned(tensor)
    if found:
        yield found


# What runs in the engine's process.

_needed: set[str] = set()
_watch: "Watch | None" = None


def load(model: Any, manifest: bytes) -> None:
    """Load the tensors of a buffer into an engine's model, and write the report. This raises no error.

    Args:
        model: the engine's model, with a method `load_weights`.
        manifest: the encoded `Manifest`.
    """
    content = json.loads(manifest)
    with open(content["path"], "r+b") as file, contextlib.closing(_Mapped(file.fileno())) as mapped:
        try:
            report = _load(model, Manifest(**content), mapped.memory)
        except Exception as error:  # noqa: BLE001 (the writer raises it; loaders raise errors of many kinds)
            final = isinstance(error, FinalError)
            report = Report(str(error) if final else short_reason(error), final)
        text = json.dumps(asdict(report)).encode()
        mapped.memory[8 : 8 + len(text)] = text
        mapped.memory[:8] = len(text).to_bytes(8, "little")


class _Mapped:
    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, 0)

    def close(self) -> None:
        # Tensors of a loader that has kept them still refer to it; it ends with them.
        with contextlib.suppress(BufferError):
            self.memory.close()


def _load(model: Any, manifest: Manifest, memory: mmap.mmap) -> Report:
    import torch

    from pipeline.weights.confirm import Watch

    def tensors() -> "Iterator[tuple[str, torch.Tensor]]":
        for name, dtype, shape, offset in manifest.tensors:
            kind = getattr(torch, dtype)
            count = torch.Size(shape).numel()
            yield name, torch.frombuffer(memory, dtype=kind, count=count, offset=offset).view(shape)

    global _watch
    if not _needed:
        # Tied parameters are one until an update fails half way.
        _needed.update(name for name, _ in model.named_parameters())
    if manifest.first:
        _watch = Watch(model, _needed) if manifest.check else None
    if _watch is None:
        model.load_weights(tensors())
        return Report()
    _watch.load(tensors())
    return Report(unread=sorted(_watch.unread), left=sorted(_watch.left))
