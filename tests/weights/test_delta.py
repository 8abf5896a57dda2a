"""Changes instead of whole weights: what arrives is the same to the last bit, and damage is seen."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipeline.config import Config
from pipeline.stats import reduce
from pipeline.train.setup import build_publishers
from pipeline.weights.delta import HEAD, INDICES, MASK, MAX_STEPS, WHOLE, BucketCache, apply, encode
from pipeline.weights.load import Shard, checksum, parameters
from pipeline.weights.publish import WeightPublisher
from tests.weights.model import Model

LIMIT = 300
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40]


def update(model: nn.Module, share: float, rng: random.Random) -> None:
    """Change about so many of the weights and buffers, some of them to numbers that are no ordinary ones."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            flat = tensor.view(-1)
            for i in range(len(flat)):
                if rng.random() < share and flat.is_floating_point():
                    flat[i] = rng.choice(SPECIAL) if rng.random() < 0.2 else rng.gauss(0, 1)
                elif rng.random() < share:
                    flat[i] = rng.randrange(2)


def bits(shards: list[Shard], cache: BucketCache | None = None, fetched: list[int] | None = None) -> dict[str, Any]:
    """What arrives, bit by bit; `fetched` gets the bytes of every fetch."""

    def fetch(refs: list[Any]) -> list[Any]:
        if fetched is not None:
            fetched.append(sum(len(ref) for ref in refs))
        return refs

    arrived = parameters(shards, fetch, cache)
    return {name: tensor.reshape(-1).view(torch.uint8).tolist() for name, tensor in arrived}


def fetched_bytes(shard: Shard, cache: BucketCache) -> int:
    fetched: list[int] = []
    bits([shard], cache, fetched)
    return sum(fetched)


def publisher(dtype: torch.dtype = torch.bfloat16, delta: bool = True) -> WeightPublisher:
    return WeightPublisher(0, dtype, LIMIT, lambda buffer: bytes(buffer), delta=delta)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.lists(st.sampled_from([0.0, 0.002, 0.02, 0.3, 1.0]), min_size=1, max_size=9),
    st.integers(0, 10**6),
)
def test_changes_arrive_as_whole_weights_do_also_where_versions_were_missed(
    dtype: torch.dtype, shares: list[float], seed: int
) -> None:
    rng, model = random.Random(seed), Model(seed)
    delta, plain = publisher(dtype), publisher(dtype, delta=False)
    engines = [BucketCache() for _ in range(3)]
    for version, share in enumerate(shares):
        update(model, share, rng)
        shards, whole = [delta.pack(model, version)], [plain.pack(model, version)]
        expected = bits(whole)
        assert bits(shards) == expected, "a replica that keeps nothing"
        assert checksum(shards) == checksum(whole), "what is acknowledged does not depend on the way"
        for number, cache in enumerate(engines):
            # The first engine takes every version, the others miss some.
            if number == 0 or rng.random() < 0.5:
                assert bits(shards, cache) == expected
                assert cache.version == version


def test_an_engine_fetches_changes_alone_and_a_new_one_everything() -> None:
    rng, model, made, old = random.Random(1), Model(), publisher(), BucketCache()
    whole = sum(tensor.nbytes for tensor in model.state(torch.bfloat16).values())
    for version in range(3):
        shard = made.pack(model, version)
        assert fetched_bytes(shard, old) == (made.bytes if version else whole) and made.whole_bytes == whole
        assert version == 0 or made.bytes < whole / 2
        assert fetched_bytes(shard, BucketCache()) == whole
        update(model, 0.01, rng)


def test_missed_versions_are_made_up_for_step_by_step() -> None:
    rng, model, made = random.Random(2), Model(), publisher()
    shards = []
    for version in range(MAX_STEPS + 3):
        shards.append(made.pack(model, version))
        update(model, 0.001, rng)
    assert [step.since for step in shards[-1].steps] == list(range(2, MAX_STEPS + 2))
    for version, travels in ((2, True), (1, False)):
        cache = BucketCache()
        bits([shards[version]], cache)
        assert (fetched_bytes(shards[-1], cache) < made.whole_bytes) == travels
    # The same version once more, as after a sleep, costs nothing.
    assert fetched_bytes(shards[-1], cache) == 0 and cache.version == MAX_STEPS + 2


def test_what_changes_everywhere_travels_whole() -> None:
    rng, model, made, cache = random.Random(3), Model(), publisher(), BucketCache()
    bits([made.pack(model, 0)], cache)
    update(model, 1.0, rng)
    shard = made.pack(model, 1)
    assert shard.steps == [] and made.bytes == fetched_bytes(shard, cache) == made.whole_bytes


def test_a_version_that_does_not_follow_is_whole() -> None:
    made, model = publisher(), Model()
    made.pack(model, 3)
    assert made.pack(model, 5).steps == []
    assert [step.since for step in made.pack(model, 6).steps] == [5]


def damaged(shard: Shard, number: int, position: int) -> Shard:
    """A bit of the last step has flipped."""
    step = shard.steps[-1]
    blob = bytearray(step.buckets[number])
    blob[position] ^= 1
    buckets = [bytes(blob) if i == number else bucket for i, bucket in enumerate(step.buckets)]
    return replace(shard, steps=[*shard.steps[:-1], replace(step, buckets=buckets)])


def test_no_flipped_bit_changes_a_weight_and_the_next_load_is_whole() -> None:
    rng, model, made = random.Random(4), Model(), publisher()
    first = made.pack(model, 0)
    update(model, 0.05, rng)
    second = made.pack(model, 1)
    seen, unseen = 0, 0
    for number, bucket in enumerate(second.steps[-1].buckets):
        for position in range(len(bucket)):
            cache = BucketCache()
            bits([first], cache)
            try:
                arrived = bits([damaged(second, number, position)], cache)
            except ValueError as error:
                assert "arrived damaged" in str(error) and cache.version == -1
                seen += 1
            else:
                # Of a mask, bits past the last number mean nothing.
                assert arrived == bits([second])
                unseen += 1
    assert seen > 20 * unseen
    cache = BucketCache()
    bits([first], cache)
    with pytest.raises(ValueError, match="arrived damaged"):
        bits([damaged(second, 0, len(second.steps[-1].buckets[0]) - 1)], cache)
    assert fetched_bytes(second, cache) == made.whole_bytes and cache.version == 1


def test_what_an_engine_holds_is_verified_too() -> None:
    model, made, cache = Model(), publisher(), BucketCache()
    bits([made.pack(model, 0)], cache)
    cache._buckets[0, 0][3] ^= 1
    with pytest.raises(ValueError, match="weights bucket 0 of train rank 0 arrived damaged"):
        bits([made.pack(model, 1)], cache)


def test_a_load_that_breaks_off_leaves_nothing_to_build_on() -> None:
    rng, model, made, cache = random.Random(5), Model(), publisher(), BucketCache()
    bits([made.pack(model, 0)], cache)
    update(model, 0.01, rng)
    shard = made.pack(model, 1)
    next(parameters([shard], lambda refs: refs, cache))
    assert cache.version == -1 and fetched_bytes(shard, cache) == made.whole_bytes
    assert bits([shard], cache) == bits([shard])


@pytest.mark.parametrize("transport", ["object_store", "delta"])
def test_the_setting_decides_how_the_policy_is_published(transport: str) -> None:
    config = Config()
    config.trainer.weight_transport = transport
    model: Any = Model()
    model.hf_name = lambda name: f"lm.{name}"
    actor: Any = SimpleNamespace(module=model)
    with patch("ray.put", lambda buffer: bytes(buffer)):
        made = build_publishers(config, actor, None, 0, torch.device("cpu"))["policy"]
        shards = [made.pack(model, version) for version in range(2)]
    assert bool(shards[1].steps) == (transport == "delta")
    assert {piece.name for piece in shards[0].pieces} == {f"lm.{name}" for name in model.state_dict()}
    metrics = reduce([made.stats(), made.stats()])  # of two ranks
    assert metrics["perf/weight_bytes"] == 2 * made.bytes
    assert (metrics["perf/weight_bytes_ratio"] < 0.5) == (transport == "delta")
    # Without versions nothing is kept.
    cache = BucketCache()
    bits([shards[0]], cache)
    assert bool(cache._buckets) == (transport == "delta")


@pytest.mark.parametrize(
    ("changed", "encoding"),
    [(0, INDICES), (2, INDICES), (200, MASK), (4000, WHOLE)],
    ids=["none", "few", "many", "all"],
)
def test_the_smallest_encoding_is_taken(changed: int, encoding: int) -> None:
    old = np.zeros(8000, np.uint8)
    new = old.copy()
    new.view(np.uint16)[np.arange(0, 4000, 4000 // changed)[:changed] if changed else []] = 7
    blob = encode(old, new, [(0, 8000, 2)])
    assert HEAD.unpack(blob[: HEAD.size].tobytes()) == (encoding, changed)
    assert len(blob) - HEAD.size == min(changed * 6, 500 + changed * 2, 8000)
    apply(blob, old, [(0, 8000, 2)])
    assert (old == new).all()


@pytest.mark.parametrize("cut", [slice(0, 3), slice(0, 12), slice(0, 0)])
def test_changes_that_end_too_soon_or_too_late_are_refused(cut: slice) -> None:
    old, new = np.zeros(40, np.uint8), np.ones(40, np.uint8)
    blob = encode(old, new, [(0, 40, 2)])
    with pytest.raises(ValueError, match="arrived damaged: they end too soon"):
        apply(blob[cut], old.copy(), [(0, 40, 2)])
    with pytest.raises(ValueError, match="1 bytes are left over"):
        apply(np.append(blob, np.uint8(0)), old.copy(), [(0, 40, 2)])


def test_random_bytes_raise_nothing_but_the_damage() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        bucket = np.zeros(64, np.uint8)
        try:
            apply(rng.integers(0, 256, rng.integers(0, 90), dtype=np.uint8), bucket, [(0, 32, 2), (32, 32, 8)])
        except ValueError as error:
            assert "arrived damaged" in str(error)
