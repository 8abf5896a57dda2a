"""Kills of Ray's memory monitor are read from Ray's table of processes."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray._private.state import GlobalState
from ray.core.generated.common_pb2 import INTENDED_USER_EXIT, NODE_OUT_OF_MEMORY
from ray.core.generated.gcs_pb2 import WorkerTableData

from pipeline.upstream import ray_memory

MESSAGE = """1 worker(s) were killed due to the node running low on memory. \
Memory on the node (IP: 10.0.0.7, ID: 8c5a14) was 22.51GB used / 23.54GB limit (0.956000)
OOM kill reason: Memory usage 24170000000B exceeded threshold of 24012676915B (95.0% of 25276502016B limit)
Object store memory usage: [used 1 GB]
Ray killed 1 worker(s) based on the killing policy
Considered workers: [
Selected to kill: (Task: job ID=02000000, lease ID=a1, \
task name=MapWorker(MapBatches(Rollout)).__init__, required resources={CPU: 1}, \
pid=41, actual memory used=4.10GB, worker ID=ab)
Selected to kill: (Task: job ID=02000000, lease ID=a2, \
task name=RayTrainWorker.__init__, required resources={CPU: 1}, pid=4, actual \
memory used=9.10GB, worker ID=cd)
]
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io
"""


def worker(number: int, **other: Any) -> bytes:
    row = WorkerTableData(pid=number, exit_detail=MESSAGE, job_id=b"\2\0\0\0", memory_used_bytes_at_death=2**30)
    row.worker_address.worker_id = bytes([number])
    for name, value in ({"exit_type": NODE_OUT_OF_MEMORY} | other).items():
        setattr(row, name, value)
    return row.SerializeToString()


def test_the_installed_ray_has_the_table() -> None:
    assert isinstance(ray_memory.state, GlobalState)
    assert callable(ray_memory.state._connect_and_get_accessor)


def test_only_kills_of_the_own_job_count(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [worker(41), worker(4), worker(5, exit_type=INTENDED_USER_EXIT), worker(6, job_id=b"\1\0\0\0")]
    accessor = SimpleNamespace(get_worker_table=lambda: table)
    monkeypatch.setattr(ray_memory, "state", SimpleNamespace(_connect_and_get_accessor=lambda: accessor))
    engine, trainer = ray_memory.killed("02000000")
    assert (engine.worker, engine.pid, engine.task, engine.used) == (
        "29",
        41,
        "MapWorker(MapBatches(Rollout)).__init__",
        2**30,
    )
    assert trainer.task == "RayTrainWorker.__init__"
    assert engine.reason == (
        "Ray's memory monitor killed it when node 10.0.0.7 used 22.51 GB of memory (limit 95.0% of 23.54 GB)"
    )


def test_another_ray_names_no_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_memory, "state", None)
    assert ray_memory.killed("02000000") == []


def test_other_messages_have_no_reason() -> None:
    assert ray_memory.reason("Memory on the node was full") is None
