"""Weights from sharded ranks to whole parameters: `pack` on real gloo ranks, `parameters` on what they put."""

import threading
import time
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipeline.config import Config
from pipeline.config.learner import FSDPConfig
from pipeline.models.fsdp import shard
from pipeline.stats import reduce
from pipeline.train.setup import build_publishers
from pipeline.weights.checksum import crc
from pipeline.weights.load import Piece, Shard, checksum, parameters
from pipeline.weights.publish import WeightPublisher, pack, parts
from tests.train.updates import spawn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LIMIT = 600
"""Bytes of a bucket: a few small parameters, or a large one by itself."""


class Model(nn.Module):
    """Rows that divide by no number of ranks, fewer rows than ranks, three dimensions, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(11, 5)
        self.deep = nn.Parameter(torch.randn(7, 2, 3))
        self.short = nn.Parameter(torch.randn(2, 4))
        self.one = nn.Parameter(torch.randn(1))
        self.large = nn.Linear(30, 10)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight


def publish(model: nn.Module, rank: int, dtype: str, limit: int = LIMIT) -> Shard:
    """What a rank publishes, its buffers in place of object refs."""
    return pack(parts(model, rank, DTYPES[dtype], "model.{}".format), rank, limit, lambda buffer: buffer.tobytes())


def work(rank: int, folder: str) -> None:
    """One process, which is rank `rank` of the groups of 1 and 2 ranks that it belongs to."""
    torch.set_num_threads(1)
    for world in range(rank + 1, 3):
        store = dist.FileStore(f"{folder}/store{world}", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        model = shard(Model(), FSDPConfig(), "cpu")
        for dtype in DTYPES:
            torch.save(asdict(publish(model, rank, dtype)), f"{folder}/{world}-{dtype}-{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    spawn(work, str(folder))
    return folder


def shards(folder: Path, world: int, dtype: str) -> list[Shard]:
    def read(rank: int) -> Shard:
        fields: dict[str, Any] = torch.load(folder / f"{world}-{dtype}-{rank}.pt", weights_only=True)
        return Shard(**fields | {"pieces": [Piece(**piece) for piece in fields["pieces"]]})

    return [read(rank) for rank in range(world)]


def expected(dtype: str) -> dict[str, torch.Tensor]:
    return {f"model.{name}": p.detach().to(DTYPES[dtype]) for name, p in Model().named_parameters()}


def fetch(refs: list[bytes]) -> list[bytes]:
    return refs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2])
def test_every_parameter_arrives_exactly_and_once(published: Path, world: int, dtype: str) -> None:
    made = shards(published, world, dtype)
    arrived = list(parameters(made, fetch))
    wanted = expected(dtype)
    assert [name for name, _ in arrived] == list(wanted)  # the tied head is the embedding
    assert "model.head.weight" not in wanted
    for name, tensor in arrived:
        assert tensor.dtype == DTYPES[dtype] and torch.equal(tensor, wanted[name])
    # The order in which the shards are handed over does not matter.
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in parameters(made[::-1], fetch))
    assert checksum(made) == checksum(made[::-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2])
def test_buckets_are_bounded_and_the_same_on_all_ranks(published: Path, world: int, dtype: str) -> None:
    made = shards(published, world, dtype)
    assert len({len(s.buckets) for s in made}) == 1 and len(made[0].buckets) > 2
    for number in range(len(made[0].buckets)):
        names = {piece.name for s in made for piece in s.pieces if piece.bucket == number}
        size = sum(len(s.buckets[number]) for s in made)
        assert size == sum(expected(dtype)[name].nbytes for name in names)
        assert size <= LIMIT or len(names) == 1
    for s in made:
        for piece in s.pieces:
            assert len(s.buckets[piece.bucket]) >= piece.offset + piece.nbytes > piece.offset
    # No rank sends what another one holds.
    whole = sum(tensor.nbytes for tensor in expected(dtype).values())
    assert sum(len(bucket) for s in made for bucket in s.buckets) == whole
    assert all(sum(map(len, s.buckets)) < whole for s in made) or world == 1


def test_the_next_bucket_is_fetched_while_the_caller_has_one_and_no_other(published: Path) -> None:
    made = shards(published, 2, "float32")
    buckets = [[s.buckets[number] for s in made] for number in range(len(made[0].buckets))]
    asked: list[list[bytes]] = []
    came = threading.Event()

    def watch(refs: list[bytes]) -> list[bytes]:
        asked.append(refs)
        if len(asked) == 2:
            came.set()
        return refs

    stream = parameters(made, watch)
    next(stream)
    assert came.wait(20), "the second bucket is not fetched before the caller is done with the first"
    time.sleep(0.1)
    assert asked == buckets[:2]
    list(stream)
    assert asked == buckets


def test_what_one_rank_holds_whole_is_not_copied(published: Path) -> None:
    for world in (1, 2):
        made = shards(published, world, "float32")
        buffers = [bytearray(bucket) for s in made for bucket in s.buckets]
        for s in made:
            s.buckets[:] = [next(b for b in buffers if b == bucket) for bucket in s.buckets]
        places = [torch.frombuffer(b, dtype=torch.uint8).data_ptr() for b in buffers if b]
        sizes = [len(b) for b in buffers if b]
        for name, tensor in parameters(made, fetch):
            is_view = any(p <= tensor.data_ptr() < p + size for p, size in zip(places, sizes, strict=True))
            parts = [piece for s in made for piece in s.pieces if piece.name == name]
            assert is_view == (len(parts) == 1), name


def test_the_checksum_covers_every_bucket_of_every_rank_in_rank_order(published: Path) -> None:
    made = shards(published, 2, "float32")
    value = checksum(made)
    for rank in range(2):
        for number in range(len(made[0].buckets)):
            checksums = list(made[rank].checksums)
            checksums[number] ^= 1
            changed = [replace(s, checksums=checksums) if s.rank == rank else s for s in made]
            assert checksum(changed) != value
    swapped = [replace(made[0], checksums=made[0].checksums[::-1]), made[1]]
    assert len({value, checksum(swapped), checksum(made[:1])}) == 3 and value == checksum(made[::-1])


def test_what_does_not_add_up_is_refused(published: Path) -> None:
    made = shards(published, 2, "float32")
    with pytest.raises(ValueError, match=r"'model.deep': the ranks published 24 of 42 numbers"):
        list(parameters(made[:1], fetch))
    lacking = replace(made[0], pieces=[p for p in made[0].pieces if p.name != "model.embedding.weight"])
    with pytest.raises(ValueError, match=r"'model.embedding.weight': the ranks published 25 of 55 numbers"):
        list(parameters([lacking, *made[1:]], fetch))
    damaged = bytearray(made[1].buckets[1])
    damaged[-1] ^= 1
    made[1].buckets[1] = bytes(damaged)
    with pytest.raises(ValueError, match="weights bucket 1 of train rank 1 arrived damaged"):
        list(parameters(made, fetch))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=5), st.data())
def test_any_cut_into_blocks_joins_again(shapes: list[tuple[int, int]], data: Any) -> None:
    """Four ranks, which hold the blocks left when each parameter is cut at some row and at some column."""
    tensors = {f"p{i}": torch.arange(float(a * b)).view(a, b) + i for i, (a, b) in enumerate(shapes)}
    made = [Shard(rank, [], [b""], []) for rank in range(4)]
    for name, tensor in tensors.items():
        row, column = (data.draw(st.integers(0, size)) for size in tensor.shape)
        blocks = product((slice(0, row), slice(row, len(tensor))), (slice(0, column), slice(column, tensor.shape[1])))
        for s, (rows, columns) in zip(made, blocks, strict=True):
            part = tensor[rows, columns]
            if part.numel():
                start = rows.start, columns.start
                s.pieces.append(Piece(name, tensor.shape, start, part.shape, 0, len(s.buckets[0]), part.nbytes))
                s.buckets[0] += part.numpy().tobytes()
    for s in made:
        s.checksums.append(crc(s.buckets[0]))
    arrived = dict(parameters(made, fetch))
    assert arrived.keys() == tensors.keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors.items())


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.row = nn.Parameter(torch.arange(3.0))
        self.strided = nn.Parameter(torch.arange(6.0).view(2, 3).t())


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalars_and_unsharded_models_come_from_rank_0_alone(dtype: str) -> None:
    made = [publish(Scalars(), rank, dtype) for rank in range(2)]
    assert made[1].pieces == [] and set(made[1].buckets) == {b""} and set(made[1].checksums) == {crc(b"")}
    arrived = dict(parameters(made, fetch))
    for name, parameter in Scalars().named_parameters():
        assert torch.equal(arrived[f"model.{name}"], parameter.to(DTYPES[dtype]))
    assert arrived["model.scale"].shape == ()


def test_memory_of_buckets_is_used_again_and_not_before_they_are_stored() -> None:
    places: set[int] = set()

    def slow(buffer: Any) -> bytes:
        places.add(buffer.__array_interface__["data"][0])
        time.sleep(0.02)
        return bytes(buffer)

    made = WeightPublisher(0, torch.float32, 200, slow)
    for version in range(6):
        torch.manual_seed(version)
        model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(6)))
        shard = made.pack(model, version)
        arrived = dict(parameters([shard], fetch))
        assert all(torch.equal(arrived[name], p) for name, p in model.named_parameters())
        assert len(shard.buckets) > 3 and len(places) == 2
        assert made.bytes == sum(map(len, shard.buckets))


def test_a_bucket_that_cannot_be_stored_is_an_error() -> None:
    def full(buffer: Any) -> Any:
        raise MemoryError("the object store is full")

    with pytest.raises(MemoryError, match="object store is full"):
        pack(parts(Model(), 0, torch.float32), 0, LIMIT, full)


def test_the_policy_is_published_under_the_names_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Model()
    model.hf_name = lambda name: f"lm.{name}"
    actor: Any = SimpleNamespace(module=model, mesh=None)
    monkeypatch.setattr("ray.put", lambda buffer: bytes(buffer))
    made = build_publishers(Config(), actor, None, 0, torch.device("cpu"))["policy"]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert {piece.name for piece in made.pack(model, 0).pieces} == {f"lm.{name}" for name, _ in tensors}
    metrics = reduce([made.stats(), made.stats()])  # of two ranks
    assert metrics["perf/weight_bytes"] == 2 * made.bytes > 0
