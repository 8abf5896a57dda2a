"""Lossless changes from one version of the weights to the next.

One optimiser step changes few of the weights that an engine computes with: in bfloat16 most updates are smaller than
the last bit. So beside a version's whole buckets a rank publishes what changed in each since the version before. An
engine that holds that version fetches the changes alone and applies them; the checksums are those of the whole buckets.
A new engine, or one that has missed too many versions, fetches whole buckets. The publisher and every engine keep a
copy of the buckets in host memory.

A bucket's changes are, for each tensor, a head (encoding, count) and the smallest of

    INDICES   the indices of the changed numbers (uint32) and the numbers
    MASK      a bit for each number, and the changed numbers
    WHOLE     all numbers

Numbers are compared bit by bit, so that NaN equals NaN and -0 differs from 0.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

INDICES, MASK, WHOLE = range(3)
HEAD = struct.Struct("<BQ")
MAX_STEPS = 4
"""Steps that are published beside whole buckets: an engine may have missed one version less."""

Span = tuple[int, int, int]
"""Offset and bytes of a tensor's part in its bucket, and bytes of a number: 1, 2, 4 or 8."""


def encode(old: np.ndarray, new: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """The changes of a bucket, uint8; at most a head for each span longer than the bucket.

    Args:
        old, new: [B] uint8, the bucket before and after.
        spans: the tensors in it.
    """
    parts = []
    for offset, nbytes, itemsize in spans:
        kind = np.dtype(f"u{itemsize}")
        before, after = (data[offset : offset + nbytes].view(kind) for data in (old, new))
        changed = before != after
        count = int(np.count_nonzero(changed))
        sizes = {
            INDICES: count * (4 + itemsize) if len(after) <= 2**32 else nbytes + 1,
            MASK: -(-len(after) // 8) + count * itemsize,
            WHOLE: nbytes,
        }
        encoding = min(sizes, key=lambda name: sizes[name])
        parts.append(HEAD.pack(encoding, count))
        if encoding == INDICES:
            parts.append(np.flatnonzero(changed).astype("<u4").tobytes())
        elif encoding == MASK:
            parts.append(np.packbits(changed).tobytes())
        parts.append((after if encoding == WHOLE else after[changed]).tobytes())
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def apply(changes: Any, bucket: np.ndarray, spans: Sequence[Span]) -> None:
    """Turn a bucket [B] uint8 of the version before into that of the next, in place.

    Raises:
        ValueError: the changes are not those of such a bucket.
    """
    data = memoryview(changes)
    position = 0

    def take(dtype: Any, count: int) -> np.ndarray:
        nonlocal position
        size = np.dtype(dtype).itemsize * count
        if position + size > len(data):
            raise ValueError("they end too soon")
        position += size
        return np.frombuffer(data[position - size : position], dtype=dtype)

    try:
        for offset, nbytes, itemsize in spans:
            kind = np.dtype(f"u{itemsize}")
            target = bucket[offset : offset + nbytes].view(kind)
            encoding, count = HEAD.unpack(take(np.uint8, HEAD.size).tobytes())
            if count > len(target):
                raise ValueError(f"{count} of {len(target)} numbers are said to have changed")
            if encoding == INDICES:
                indices = take("<u4", count)
                if count and int(indices.max()) >= len(target):
                    raise ValueError("a number lies outside its parameter")
                target[indices] = take(kind, count)
            elif encoding == MASK:
                mask = np.unpackbits(take(np.uint8, -(-len(target) // 8)), count=len(target)).astype(bool)
                if np.count_nonzero(mask) != count:
                    raise ValueError("bits and numbers do not agree")
                target[mask] = take(kind, count)
            elif encoding == WHOLE:
                target[:] = take(kind, len(target))
            else:
                raise ValueError(f"{encoding} is no encoding")
        if position != len(data):
            raise ValueError(f"{len(data) - position} bytes are left over")
    except ValueError as error:
        raise ValueError(f"the changes of a weights bucket arrived damaged: {error}") from error


class BucketCache:
    """The buckets of all ranks that an engine holds, of `version`; -1 while they are incomplete."""

    def __init__(self) -> None:
        self.version = -1
        self._buckets: dict[tuple[int, int], np.ndarray] = {}
        self._chain: list[list[Any]] | None = None

    def begin(self, shards: Sequence[Any]) -> None:
        """Prepare for `take` of every bucket of this version in turn."""
        self._chain = self._steps(shards)
        if self._chain is None:
            self._buckets.clear()
        self.version = -1

    def take(self, shards: Sequence[Any], number: int, fetch: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Bucket `number` of each shard, whole; valid until the next version begins.

        Raises:
            ValueError: changes arrived damaged.
        """
        if self._chain is None:
            buffers = fetch([shard.buckets[number] for shard in shards])
            for shard, buffer in zip(shards, buffers, strict=True):
                # A copy: the shared memory of the object store is freed with its version.
                self._buckets[shard.rank, number] = np.array(np.frombuffer(buffer, dtype=np.uint8))
        for steps in self._chain or ():
            changes = fetch([step.buckets[number] for step in steps])
            for shard, change in zip(shards, changes, strict=True):
                apply(change, self._buckets[shard.rank, number], shard.spans(number))
        return [self._buckets[shard.rank, number] for shard in shards]

    def done(self, shards: Sequence[Any]) -> None:
        """All buckets are verified."""
        self.version = shards[0].version

    def _steps(self, shards: Sequence[Any]) -> list[list[Any]] | None:
        """The steps from the version that is held to that of the shards, by version and rank; None if some lack."""
        version = shards[0].version
        if not 0 <= self.version <= version or any((shard.rank, 0) not in self._buckets for shard in shards):
            return None
        chain = []
        for since in range(self.version, version):
            steps = [step for shard in shards for step in shard.steps if step.since == since]
            if len(steps) != len(shards):
                return None
            chain.append(steps)
        return chain
