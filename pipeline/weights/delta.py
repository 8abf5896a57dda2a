"""Weights as what has changed since the version before, losslessly.

One optimiser step changes few of the weights that an engine computes with: in bfloat16 most updates are smaller than
the last bit. So beside a version's whole buckets a rank publishes, for each bucket, the numbers that are other than in
the version before, and an engine that holds that version fetches these alone. It makes the whole buckets of them, whose
checksums are the published ones, as if they had travelled (`weights.parameters` verifies them either way). A new
engine, or one that has missed too many versions, fetches whole buckets.

The price is memory: the sender and every engine keep a copy of the buckets in host memory.

A bucket's changes are, piece by piece, a head (kind, count) and

    INDICES   the places of the changed numbers (uint32) and the numbers
    MASK      a bit for each number, and the changed numbers
    WHOLE     all numbers

whichever is smallest. Numbers are compared bit by bit, so that NaN is NaN and -0 is not 0.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pipeline.weights.load import Shard

INDICES, MASK, WHOLE = range(3)
HEAD = struct.Struct("<BQ")
MOST_STEPS = 4
"""Versions that an engine may have missed, and one."""

Piece = tuple[int, int]
"""Offset and bytes of a piece in its bucket."""


@dataclass(frozen=True)
class Step:
    """What one rank changed from version `since` to the next."""

    since: int
    buckets: list[Any]
    """One object ref (or the buffer itself, outside Ray) per bucket."""
    nbytes: int


def encode(old: np.ndarray, new: np.ndarray, pieces: Sequence[Piece], itemsize: int) -> np.ndarray:
    """The changes of a bucket.

    Args:
        old, new: [B] uint8, the bucket before and after.
        pieces: where the parameters stand in it.
        itemsize: bytes of a number: 1, 2, 4 or 8.

    Returns:
        uint8, at most a head a piece longer than the bucket.
    """
    kind, parts = np.dtype(f"u{itemsize}"), []
    for offset, nbytes in pieces:
        before, after = (data[offset : offset + nbytes].view(kind) for data in (old, new))
        changed = before != after
        count = int(np.count_nonzero(changed))
        sizes = {
            INDICES: count * (4 + itemsize) if len(after) <= 2**32 else nbytes + 1,
            MASK: -(-len(after) // 8) + count * itemsize,
            WHOLE: nbytes,
        }
        how = min(sizes, key=lambda name: sizes[name])
        parts.append(HEAD.pack(how, count))
        if how == INDICES:
            parts.append(np.flatnonzero(changed).astype("<u4").tobytes())
        elif how == MASK:
            parts.append(np.packbits(changed).tobytes())
        parts.append((after if how == WHOLE else after[changed]).tobytes())
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def apply(changes: Any, bucket: np.ndarray, pieces: Sequence[Piece], itemsize: int) -> None:
    """Make a bucket [B] uint8 of the version before into that of the next, in place.

    Raises:
        ValueError: the changes are not those of such a bucket.
    """
    kind, data, place = np.dtype(f"u{itemsize}"), memoryview(changes), 0

    def take(dtype: Any, count: int) -> np.ndarray:
        nonlocal place
        size = np.dtype(dtype).itemsize * count
        if place + size > len(data):
            raise ValueError("they end too soon")
        place += size
        return np.frombuffer(data[place - size : place], dtype=dtype)

    try:
        for offset, nbytes in pieces:
            target = bucket[offset : offset + nbytes].view(kind)
            how, count = HEAD.unpack(take(np.uint8, HEAD.size).tobytes())
            if count > len(target):
                raise ValueError(f"{count} of {len(target)} numbers are said to have changed")
            if how == INDICES:
                places = take("<u4", count)
                if count and int(places.max()) >= len(target):
                    raise ValueError("a number lies outside its parameter")
                target[places] = take(kind, count)
            elif how == MASK:
                mask = np.unpackbits(take(np.uint8, -(-len(target) // 8)), count=len(target)).astype(bool)
                if np.count_nonzero(mask) != count:
                    raise ValueError("bits and numbers do not agree")
                target[mask] = take(kind, count)
            elif how == WHOLE:
                target[:] = take(kind, len(target))
            else:
                raise ValueError(f"{how} is no kind of change")
        if place != len(data):
            raise ValueError(f"{len(data) - place} bytes are left over")
    except ValueError as error:
        raise ValueError(f"the changes of a weights bucket arrived damaged: {error}") from error


class Held:
    """The buckets that an engine holds, of all ranks.

    Attributes:
        version: of the buckets; -1 while they are incomplete.
        fetched: bytes that the last version took to arrive.
    """

    def __init__(self) -> None:
        self.version = -1
        self.fetched = 0
        self._buckets: dict[tuple[int, int], np.ndarray] = {}
        self._chain: list[list[Step]] | None = None

    def begin(self, shards: Sequence["Shard"]) -> None:
        """The buckets of this version are about to be taken, one after the other."""
        self._chain = self._steps(shards) if self.version >= 0 else None
        if self._chain is None:
            self._buckets.clear()
        self.version, self.fetched = -1, 0

    def take(self, shards: Sequence["Shard"], number: int, fetch: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Bucket `number` of each shard, whole; valid until the next version begins.

        Raises:
            ValueError: changes arrived damaged.
        """
        if self._chain is None:
            whole = fetch([shard.buckets[number] for shard in shards])
            for shard, buffer in zip(shards, whole, strict=True):
                self.fetched += len(buffer)
                # What came lies in shared memory, and goes with its version.
                self._buckets[shard.rank, number] = np.array(np.frombuffer(buffer, dtype=np.uint8))
        else:
            for steps in self._chain:
                changes = fetch([step.buckets[number] for step in steps])
                for shard, change in zip(shards, changes, strict=True):
                    self.fetched += len(change)
                    apply(change, self._buckets[shard.rank, number], pieces_of(shard, number), shard.itemsize)
        return [self._buckets[shard.rank, number] for shard in shards]

    def done(self, shards: Sequence["Shard"]) -> None:
        """All buckets are verified."""
        self.version = shards[0].version

    def _steps(self, shards: Sequence["Shard"]) -> list[list[Step]] | None:
        """The steps from the version that is held to the one of the shards, by version and rank; None if some lack."""
        version = shards[0].version
        if version < self.version or any((shard.rank, 0) not in self._buckets for shard in shards):
            return None
        chain = []
        for since in range(self.version, version):
            steps = [step for shard in shards for step in shard.steps if step.since == since]
            if len(steps) != len(shards):
                return None
            chain.append(steps)
        return chain


def pieces_of(shard: "Shard", number: int) -> list[Piece]:
    """Where the pieces of a bucket stand in it."""
    return [(piece.offset, piece.nbytes) for piece in shard.pieces if piece.bucket == number]
