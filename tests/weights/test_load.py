"""The receiving side on hand-made shards; with real train ranks in `tests/weights/test_publish.py`."""

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.weights.load import Piece, Shard, checksum, parameters


def split(tensors: dict[str, torch.Tensor], cuts: list[list[int]], per_bucket: int) -> list[Shard]:
    """Shards by hand: rank r holds rows `cuts[r]:cuts[r + 1]` of each tensor (as far as there are any)."""
    made = []
    names = list(tensors)
    for rank in range(len(cuts[0]) - 1):
        shard = Shard(rank, [], [], [])
        for number in range(0, len(names), per_bucket):
            data = b""
            for name, cut in list(zip(names, cuts, strict=True))[number : number + per_bucket]:
                part = tensors[name][cut[rank] : cut[rank + 1]].contiguous()
                raw = part.view(torch.uint8).numpy().tobytes() if part.numel() else b""
                if raw:
                    dtype = str(part.dtype).removeprefix("torch.")
                    place = (number // per_bucket, len(data), len(raw))
                    shape = tuple(tensors[name].shape)
                    shard.pieces.append(Piece(name, dtype, shape, cut[rank], cut[rank + 1], *place))
                data += raw
            shard.buckets.append(data)
            shard.checksums.append(zlib.crc32(data))
        made.append(shard)
    return made


@st.composite
def versions(draw: Any) -> tuple[dict[str, torch.Tensor], list[Shard]]:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    world = draw(st.integers(1, 4))
    tensors, cuts = {}, []
    for number in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        tensors[f"p{number}"] = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)
        inner = sorted(draw(st.lists(st.integers(0, shape[0]), min_size=world - 1, max_size=world - 1)))
        cuts.append([0, *inner, shape[0]])
    return tensors, split(tensors, cuts, draw(st.integers(1, 3)))


@settings(max_examples=100, deadline=None)
@given(versions())
def test_any_cut_into_rows_joins_again(version: tuple[dict[str, torch.Tensor], list[Shard]]) -> None:
    tensors, shards = version
    arrived = dict(parameters(shards, lambda refs: refs))
    assert arrived.keys() == tensors.keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors.items())


def two_ranks() -> list[Shard]:
    return split({"a": torch.arange(6.0).view(3, 2), "b": torch.ones(4)}, [[0, 2, 3], [0, 4, 4]], per_bucket=1)


def test_refs_are_fetched_and_read_only_memory_is_fine() -> None:
    shards = two_ranks()
    stored = {}
    for shard in shards:
        for number, data in enumerate(shard.buckets):
            buffer = np.frombuffer(data, dtype=np.uint8)  # as `ray.get` gives it: not writable
            assert not buffer.flags.writeable
            stored[shard.rank, number] = buffer
            shard.buckets[number] = (shard.rank, number)
    arrived = dict(parameters(shards, lambda refs: [stored[ref] for ref in refs]))
    assert arrived["a"].tolist() == [[0, 1], [2, 3], [4, 5]]
    arrived["a"].add_(1)  # a copy: the stored bytes stay as they are
    assert dict(parameters(shards, lambda refs: [stored[ref] for ref in refs]))["a"][0, 0] == 0


def test_what_does_not_fit_is_refused() -> None:
    shards = two_ranks()
    shards[0].buckets[0] = shards[0].buckets[0][:-1] + b"\xff"
    with pytest.raises(ValueError, match="weights bucket 0 of train rank 0 arrived damaged"):
        list(parameters(shards, lambda refs: refs))
    with pytest.raises(ValueError, match="parameter 'a': the ranks published 2 of 3 rows"):
        list(parameters(two_ranks()[:1], lambda refs: refs))


def test_checksum_covers_every_bucket_of_every_rank_in_rank_order() -> None:
    shards = two_ranks()
    value = checksum(shards)
    assert value == checksum(shards[::-1])
    for rank in range(2):
        for number in range(2):
            crcs = list(shards[rank].checksums)
            crcs[number] ^= 1
            changed = list(shards)
            changed[rank] = replace(shards[rank], checksums=crcs)
            assert checksum(changed) != value
    assert checksum(shards[:1]) != value
