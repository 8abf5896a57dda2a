"""Weights that are read out of a train worker's memory: with NIXL where it is installed, else with stand-ins.

The stand-in for NIXL copies between addresses of this process. What GPUs would do differently is not tested here.
"""

import ctypes
import multiprocessing
import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.config import Config
from pipeline.config.trainer import DeadlineConfig
from pipeline.run.faults import SECONDARY, kinds
from pipeline.scoring.replica import StoreWeights
from pipeline.store.versions import Ticket
from pipeline.train.setup import build_publishers
from pipeline.weights import direct
from pipeline.weights.direct import PublishedMemory, read
from pipeline.weights.load import Shard, checksum, fetch, parameters
from pipeline.weights.publish import WeightPublisher
from tests.weights.model import Model

CPU = torch.device("cpu")
LIMIT = 300
PARTS = 3
CALL_S = 60.0
LIVING: list[PublishedMemory] = []
"""A train worker outlives what it publishes."""


def publisher(rank: int = 0) -> WeightPublisher:
    memory = PublishedMemory(rank, PARTS, CPU)
    LIVING.append(memory)
    return WeightPublisher(rank, torch.bfloat16, LIMIT, lambda buffer: pytest.fail("put"), memory=memory)


def arrived(shards: list[Shard], timeout: float = CALL_S) -> dict[str, torch.Tensor]:
    return dict(parameters(shards, lambda refs: fetch(refs, "cpu", timeout)))


def check_is(got: dict[str, torch.Tensor], version: int) -> None:
    wanted = Model(version).state(torch.bfloat16)
    assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)


class Agent:
    """NIXL's calls, within one process."""

    def __init__(self, name: str, config: Any) -> None:
        self.name, self.registered, self.known, self.open = name, 0, [], 0
        self.state, self.error = "DONE", None

    def register_memory(self, tensor: torch.Tensor) -> int:
        assert tensor.nbytes
        self.registered += 1
        return 1

    def deregister_memory(self, count: int) -> None:
        self.registered -= count

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> None:
        self.known.append(metadata.decode())

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> tuple[int, int, int]:
        assert mem_type == "DRAM"
        return descs[0]

    def initialize_xfer(self, kind: str, here: Any, there: Any, remote: str, message: bytes) -> Any:
        if self.error:
            raise self.error
        assert kind == "READ" and remote in self.known and here[1] == there[1]
        self.open += 1
        return here[0], there[0], here[1]

    def transfer(self, handle: Any) -> str:
        ctypes.memmove(*handle)
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        return self.state

    def release_xfer_handle(self, handle: Any) -> None:
        self.open -= 1


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    api: Any = ModuleType("nixl._api")
    api.nixl_agent, api.nixl_agent_config = Agent, lambda backends: backends
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    caches = (direct.nixl_agent, direct._introduce)
    for cache in caches:
        cache.cache_clear()
    yield direct.nixl_agent()
    for cache in caches:
        cache.cache_clear()


# NIXL, by the stand-in


def test_every_version_arrives_and_stands_while_others_are_written(agent: Agent) -> None:
    made, model, shards = publisher(), Model(), {}
    for version in range(5, 12):
        # The same parameters with other weights: what is published is a copy.
        model.load_state_dict(Model(version).state_dict())
        shards[version] = pickle.loads(pickle.dumps(made.pack(model, version)))
        for standing in range(max(5, version - PARTS + 1), version + 1):
            check_is(arrived([shards[standing]]), standing)
    assert made.bytes == sum(t.nbytes for t in model.state(torch.bfloat16).values())
    # The publisher's memory alone, registered and made known once; every read releases what it took.
    assert (agent.registered, agent.open, agent.known) == (1, 0, [agent.name])
    assert len({checksum([shard]) for shard in shards.values()}) == len(shards)


def test_ranks_without_a_part_of_the_weights_are_not_read(agent: Agent) -> None:
    shards = [publisher(rank=rank).pack(Model(3), 0) for rank in (0, 1)]
    assert all(remote.nbytes == 0 and remote.agent == "" for remote in shards[1].buckets)
    check_is(arrived(shards), 3)


def test_a_train_worker_that_cannot_be_read_counts_as_the_echo_of_its_death(agent: Agent) -> None:
    shard = publisher().pack(Model(), 0)
    agent.state = "ERR"
    with pytest.raises(ConnectionError, match="memory of train rank 0 cannot be read") as error:
        arrived([shard])
    assert kinds(error.value) & SECONDARY
    agent.error = RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
    with pytest.raises(ConnectionError, match="NIXL_ERR_REMOTE_DISCONNECT"):
        arrived([shard])


def test_a_replica_reads_as_an_engine_does(agent: Agent) -> None:
    module = Model(1)
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16()
    store: Any = None
    weights = StoreWeights(module, store, "policy", DeadlineConfig(publish=CALL_S))
    weights._load(Ticket(4, [publisher().pack(Model(9), 4)]))
    check_is(module.state_dict(), 9)
    agent.state = "PROC"
    weights._deadlines.publish = 0.01
    with pytest.raises(TimeoutError, match=r"train rank 0 was not read within .* \(trainer.deadl"):
        weights._load(Ticket(5, [publisher().pack(Model(9), 5)]))


@pytest.mark.parametrize("staleness", [0, 3])
def test_the_policy_is_kept_for_as_many_versions_as_may_be_read(agent: Agent, staleness: int) -> None:
    config = Config()
    config.trainer.weight_transport, config.algorithm.max_staleness = "nixl", staleness
    model: Any = Model()
    model.hf_name = lambda name: f"lm.{name}"
    actor: Any = SimpleNamespace(module=model, mesh=None)
    made = build_publishers(config, actor, None, 0, CPU)["policy"]
    first = made.pack(model, 0)
    for version in range(1, staleness + 2):
        made.pack(Model(version), version)
    assert all(name.startswith("lm.") for name in arrived([first]))
    made.pack(Model(1), staleness + 2)
    with pytest.raises(ValueError, match="arrived damaged"):
        arrived([first])


def test_without_nixl_the_train_worker_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    direct.nixl_agent.cache_clear()
    with pytest.raises(ImportError, match="on every node, and it cannot be imported here .* pip install nixl"):
        PublishedMemory(0, 2, CPU)


# NIXL itself


def work(pipe: Any) -> None:
    """A train worker in a process of its own: gets version numbers, sends shards."""
    torch.set_num_threads(1)
    made = publisher()
    while (version := pipe.recv()) is not None:
        pipe.send(made.pack(Model(version), version))


@pytest.fixture
def worker() -> Iterator[tuple[Any, Any]]:
    pytest.importorskip("nixl", exc_type=ImportError)
    direct.nixl_agent.cache_clear()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    process = context.Process(target=work, args=(end,), daemon=True)
    process.start()
    yield process, pipe
    process.kill()
    process.join(CALL_S)


def test_nixl_reads_another_process_s_memory_until_it_dies(worker: tuple[Any, Any]) -> None:
    process, pipe = worker
    shards: dict[int, Shard] = {}
    for version in range(2 * PARTS):
        pipe.send(version)
        assert pipe.poll(CALL_S), "the train worker sent nothing"
        shards[version] = pipe.recv()
        for standing in range(max(0, version - PARTS + 1), version + 1):
            check_is(arrived([shards[standing]]), standing)
    with pytest.raises(ValueError, match="arrived damaged"):
        arrived([shards[0]])
    last = shards[2 * PARTS - 1]
    with pytest.raises(ValueError, match="weights bucket 1 of train rank 0 arrived damaged"):
        arrived([replace(last, checksums=[last.checksums[0], *(crc ^ 1 for crc in last.checksums[1:])])])
    process.kill()
    process.join(CALL_S)
    with pytest.raises(ConnectionError, match="memory of train rank 0 cannot be read"):
        read(last.buckets[:1], "cpu", CALL_S)
