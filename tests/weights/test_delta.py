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
from pipeline.weights.delta import HEAD, INDICES, MASK, MOST_STEPS, WHOLE, Held, apply, encode
from pipeline.weights.load import Shard, checksum, parameters
from pipeline.weights.publish import Sender

LIMIT = 300
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40]


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(13, 7)
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11)


def update(model: nn.Module, share: float, rng: random.Random) -> None:
    """Change about so many of the weights, some of them to numbers that are no ordinary ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            for i in range(len(flat)):
                if rng.random() < share:
                    flat[i] = rng.choice(SPECIAL) if rng.random() < 0.2 else rng.gauss(0, 1)


def bits(shards: list[Shard], held: Held | None, asked: list[int] | None = None) -> dict[str, list[int]]:
    """What arrives, bit by bit; `asked` gets the bytes that were fetched."""

    def fetch(refs: list[Any]) -> list[Any]:
        if asked is not None:
            asked.append(sum(len(ref) for ref in refs))
        return refs

    kind = {2: torch.int16, 4: torch.int32}[shards[0].itemsize]
    return {name: tensor.view(kind).flatten().tolist() for name, tensor in parameters(shards, fetch, held)}


def sender(dtype: torch.dtype = torch.bfloat16, delta: bool = True) -> Sender:
    return Sender(0, dtype, LIMIT, lambda buffer: bytes(buffer), delta=delta)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.lists(st.sampled_from([0.0, 0.002, 0.02, 0.3, 1.0]), min_size=1, max_size=9),
    st.integers(0, 10**6),
)
def test_changes_arrive_as_whole_weights_do_also_where_versions_were_missed(
    dtype: torch.dtype, shares: list[float], seed: int
) -> None:
    rng, model, send, plain = random.Random(seed), Model(seed), sender(dtype), sender(dtype, delta=False)
    engines = [Held() for _ in range(3)]
    for version, share in enumerate(shares):
        update(model, share, rng)
        shards, whole = [send.pack(model, version)], [plain.pack(model, version)]
        expected = bits(whole, None)
        assert bits(shards, None) == expected, "a replica that keeps nothing"
        assert checksum(shards) == checksum(whole), "what is acknowledged does not depend on the way"
        for number, held in enumerate(engines):
            # The first engine takes every version, the others miss some.
            if number == 0 or rng.random() < 0.5:
                assert bits(shards, held) == expected
                assert held.version == version


def test_an_engine_fetches_changes_alone_and_a_new_one_everything() -> None:
    rng, model, send, old = random.Random(1), Model(), sender(), Held()
    whole = sum(p.numel() * 2 for p in model.parameters())
    for version in range(3):
        shard = send.pack(model, version)
        asked: list[int] = []
        bits([shard], old, asked)
        assert old.fetched == sum(asked) == (send.bytes if version else whole) and send.whole_bytes == whole
        assert version == 0 or send.bytes < whole / 2
        fresh = Held()
        bits([shard], fresh)
        assert fresh.fetched == whole
        update(model, 0.01, rng)


def test_versions_that_were_missed_are_made_up_for_step_by_step() -> None:
    rng, model, send = random.Random(2), Model(), sender()
    shards = []
    for version in range(MOST_STEPS + 3):
        shards.append(send.pack(model, version))
        update(model, 0.001, rng)
    assert [step.since for step in shards[-1].steps] == list(range(2, MOST_STEPS + 2))
    for held_version, travels in ((2, True), (1, False)):
        held = Held()
        bits([shards[held_version]], held)
        bits([shards[-1]], held)
        assert (held.fetched < send.whole_bytes) == travels
    # The same version once more, as after a sleep, costs nothing.
    bits([shards[-1]], held)
    assert held.fetched == 0 and held.version == MOST_STEPS + 2


def test_what_changes_everywhere_travels_whole() -> None:
    rng, model, send, held = random.Random(3), Model(), sender(), Held()
    bits([send.pack(model, 0)], held)
    update(model, 1.0, rng)
    shard = send.pack(model, 1)
    assert shard.steps == [] and send.bytes == send.whole_bytes
    assert bits([shard], held) == bits([shard], None) and held.fetched == send.whole_bytes


def test_a_version_that_does_not_follow_is_whole() -> None:
    send, model = sender(), Model()
    send.pack(model, 3)
    assert send.pack(model, 5).steps == []
    assert [step.since for step in send.pack(model, 6).steps] == [5]


def damaged(shard: Shard, number: int, place: int) -> Shard:
    """A bit of the last step has fallen over."""
    blob = bytearray(shard.steps[-1].buckets[number])
    blob[place] ^= 1
    buckets = [bytes(blob) if i == number else bucket for i, bucket in enumerate(shard.steps[-1].buckets)]
    return replace(shard, steps=[*shard.steps[:-1], replace(shard.steps[-1], buckets=buckets)])


def test_no_flipped_bit_changes_a_weight_and_the_next_load_is_whole() -> None:
    rng, model, send = random.Random(4), Model(), sender()
    first = send.pack(model, 0)
    update(model, 0.05, rng)
    second = send.pack(model, 1)
    seen, unseen = 0, 0
    for number, bucket in enumerate(second.steps[-1].buckets):
        for place in range(len(bucket)):
            held = Held()
            bits([first], held)
            try:
                arrived = bits([damaged(second, number, place)], held)
            except ValueError as error:
                assert "arrived damaged" in str(error) and held.version == -1
                seen += 1
            else:
                # Of a mask, bits past the last number mean nothing.
                assert arrived == bits([second], None)
                unseen += 1
    assert seen > 20 * unseen
    held = Held()
    bits([first], held)
    with pytest.raises(ValueError, match="arrived damaged"):
        bits([damaged(second, 0, len(second.steps[-1].buckets[0]) - 1)], held)
    assert bits([second], held) == bits([second], None)
    assert held.version == 1 and held.fetched == send.whole_bytes


def test_what_an_engine_holds_is_verified_too() -> None:
    model, send, held = Model(), sender(), Held()
    bits([send.pack(model, 0)], held)
    held._buckets[0, 0][3] ^= 1
    with pytest.raises(ValueError, match="weights bucket 0 of train rank 0 arrived damaged"):
        bits([send.pack(model, 1)], held)


def test_a_load_that_breaks_off_leaves_nothing_to_build_on() -> None:
    rng, model, send, held = random.Random(5), Model(), sender(), Held()
    bits([send.pack(model, 0)], held)
    update(model, 0.01, rng)
    shard = send.pack(model, 1)
    next(parameters([shard], lambda refs: refs, held))
    assert held.version == -1
    assert bits([shard], held) == bits([shard], None) and held.fetched == send.whole_bytes


@pytest.mark.parametrize("transport", ["object_store", "delta"])
def test_the_setting_says_what_the_policy_is_sent_as(transport: str) -> None:
    config = Config()
    config.trainer.weight_transport = transport
    model: Any = Model()
    model.hf_name = lambda name: f"lm.{name}"
    actor: Any = SimpleNamespace(module=model)
    with patch("ray.put", lambda buffer: bytes(buffer)):
        send = build_publishers(config, actor, None, 0, torch.device("cpu"))["policy"]
        shards = [send.pack(model, version) for version in range(2)]
    assert bool(shards[1].steps) == (transport == "delta")
    assert {piece.name for piece in shards[0].pieces} == {f"lm.{name}" for name, _ in model.named_parameters()}
    metrics = reduce([send.stats(), send.stats()])  # of two ranks
    assert metrics["perf/weight_bytes"] == 2 * send.bytes
    assert (metrics["perf/weight_bytes_ratio"] < 0.5) == (transport == "delta")


def test_without_versions_nothing_is_kept() -> None:
    held = Held()
    bits([sender(delta=False).pack(Model(), 0)], held)
    assert held.version == -1 and not held._buckets


@pytest.mark.parametrize(
    ("changed", "how"), [(0, INDICES), (2, INDICES), (200, MASK), (4000, WHOLE)], ids=["none", "few", "many", "all"]
)
def test_the_smallest_way_is_taken(changed: int, how: int) -> None:
    old = np.zeros(8000, np.uint8)
    new = old.copy()
    new.view(np.uint16)[np.arange(0, 4000, 4000 // changed)[:changed] if changed else []] = 7
    blob = encode(old, new, [(0, 8000)], 2)
    kind, count = HEAD.unpack(blob[: HEAD.size].tobytes())
    assert (kind, count) == (how, changed)
    assert len(blob) - HEAD.size == min(changed * 6, 500 + changed * 2, 8000)
    apply(blob, old, [(0, 8000)], 2)
    assert (old == new).all()


@pytest.mark.parametrize("cut", [slice(0, 3), slice(0, 12), slice(0, 0)])
def test_changes_that_end_too_soon_or_too_late_are_refused(cut: slice) -> None:
    old, new = np.zeros(40, np.uint8), np.ones(40, np.uint8)
    blob = encode(old, new, [(0, 40)], 2)
    with pytest.raises(ValueError, match="arrived damaged: they end too soon"):
        apply(blob[cut], old.copy(), [(0, 40)], 2)
    with pytest.raises(ValueError, match="1 bytes are left over"):
        apply(np.append(blob, np.uint8(0)), old.copy(), [(0, 40)], 2)


def test_random_bytes_are_never_taken_for_changes_of_another_size() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        bucket = np.zeros(64, np.uint8)
        try:
            apply(rng.integers(0, 256, rng.integers(0, 90), dtype=np.uint8), bucket, [(0, 32), (32, 32)], 2)
        except ValueError as error:
            assert "arrived damaged" in str(error)
