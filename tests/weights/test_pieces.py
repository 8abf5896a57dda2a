"""Weights sharded in several dimensions, over meshes of four real gloo ranks: the pieces rejoin bit for bit."""

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Sharded
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from pipeline.weights.load import Shard, parameters
from pipeline.weights.publish import local_part, pack, parts
from tests.train.updates import spawn

pytestmark = pytest.mark.slow
RANKS = 4
LIMIT = 400
PLACEMENTS: dict[str, list[Any]] = {
    "rows-columns": [Sharded(0), Sharded(1)],
    "columns-rows": [Sharded(1), Sharded(0)],
    "rows-rows": [Sharded(0), Sharded(0)],
    "columns": [Replicate(), Sharded(1)],
    "last": [Sharded(2), Replicate()],
    "last-two": [Sharded(2), Sharded(1)],
    "everywhere": [Replicate(), Replicate()],
}


class Model(nn.Module):
    """Sizes of which many divide by neither 2 nor 4."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.norm = nn.LayerNorm(5)
        self.deep = nn.Parameter(torch.randn(3, 5, 7))
        self.short = nn.Parameter(torch.randn(1, 9))


class Placed(nn.Module):
    """Parameters without a purpose, each sharded in its own way."""

    def __init__(self, mesh: Any = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        for name, placements in PLACEMENTS.items():
            for shape in ((7, 5, 3), (4, 6, 2), (1, 1, 9)):
                whole = torch.randn(shape)
                part = distribute_tensor(whole, mesh, placements) if mesh else whole
                self.register_parameter(f"{name}-{shape[0]}", nn.Parameter(part))


def tensor_parallel(mesh: Any) -> nn.Module:
    """Tensor parallel over the inner dimension, FSDP over the outer one."""
    model = Model()
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    return model


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tensor"))
    replicated = Model()
    fully_shard(replicated, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    models = {"tensor": tensor_parallel(mesh), "replicate": replicated, "placed": Placed(mesh)}
    if rank == 0:
        # What the test is for: FSDP cuts the rows that tensor parallelism has cut, and columns.
        placements = {name: getattr(p, "placements", None) for name, p in models["tensor"].named_parameters()}
        assert isinstance(placements["up.weight"][0], _StridedShard) and placements["down.weight"][1] == Sharded(1)
        assert len(placements["norm.weight"]) == 1, "tensor-parallel ranks hold the same norm, and do not know it"
    for name, model in models.items():
        shard = pack(parts(model, rank, torch.float32), rank, LIMIT, lambda buffer: buffer.tobytes())
        Path(folder, f"{name}-{rank}").write_bytes(pickle.dumps(shard))
    packed = distribute_tensor(torch.randn(8, 6), mesh["tensor"], [_StridedShard(0, split_factor=2)])
    with pytest.raises(ValueError, match=r"not a block of neighbouring rows.*actor\.parallel\.tensor=1"):
        local_part(packed, rank)
    summand = DTensor.from_local(torch.randn(2, 2), mesh["tensor"], [Partial()])
    with pytest.raises(ValueError, match="only whole numbers can be published"):
        local_part(summand, rank)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pieces")
    spawn(work, str(folder), ranks=RANKS)
    return folder


@pytest.mark.parametrize("name", ["tensor", "replicate", "placed"])
def test_pieces_of_two_dimensions_rejoin_bit_for_bit(published: Path, name: str) -> None:
    made: list[Shard] = [pickle.loads((published / f"{name}-{rank}").read_bytes()) for rank in range(RANKS)]
    expected = dict((Placed if name == "placed" else Model)().named_parameters())
    arrived = dict(parameters(made[::-1], lambda refs: refs))
    assert arrived.keys() == expected.keys() and len(made[0].buckets) > 2
    assert all(torch.equal(arrived[key], parameter) for key, parameter in expected.items())
    # Every number travels once, whoever else holds it.
    assert sum(len(bucket) for s in made for bucket in s.buckets) == sum(p.nbytes for p in expected.values())
    assert all(s.pieces for s in made) or name == "replicate"
