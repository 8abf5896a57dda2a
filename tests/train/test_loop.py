"""Errors of the train loop that say what was waited for."""

import socket
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

from pipeline.config import Config
from pipeline.errors import FinalError
from pipeline.rows import SCHEMA
from pipeline.stats import Stats, mean
from pipeline.store.policy_store import PolicyStore
from pipeline.store.status import StoreStatus
from pipeline.train.loop import Loop
from pipeline.train.report import CollectiveTimeout, timed
from tests.train.updates import spawn

STATUS = StoreStatus(1, 0, 3, False, {"admission": 2}, 7.0, "train rank 1 (publishing version 3)")


class Store:
    """A store that answers with a status."""

    def ask(self, method: Any) -> StoreStatus:
        assert method is PolicyStore.status
        return STATUS


class Bare(Loop):
    """A loop of which only the end of `_run` is real."""

    def __init__(self, body: Any):
        self.config, self.rank, self.version, self._body = Config(), 0, 3, body
        self.config.trainer.deadlines.collective = 2.0
        store: Any = Store()
        self._store = store

    def _run(self) -> dict[str, Any]:
        return self._body()


def one_of_two(rank: int, port: str, folder: str) -> None:
    """Rank 1 joins and then does nothing for as long as rank 0 may wait, and longer."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=2)
    )
    if rank == 1:
        while not (Path(folder) / "said").exists():
            time.sleep(0.05)
        return
    try:
        Bare(lambda: dist.all_reduce(torch.ones(1))).run()
    except CollectiveTimeout as error:
        (Path(folder) / "text").write_text(str(error))
    finally:
        (Path(folder) / "said").touch()


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_waited_for_until_a_deadline(tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    spawn(one_of_two, str(port), str(tmp_path))
    assert (tmp_path / "text").read_text() == (
        "collective: train rank 0 waited longer than 2 s (trainer.deadlines.collective) for the others, after version "
        "3; policy version 3 is out, store waits: 2 in admission, last heartbeat 7 s ago from train rank 1 "
        "(publishing version 3)"
    )


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the stream ended inside iteration 3, after 1 chunks"),
        FinalError("the reward failed for 100% of the rows; one of them: it timed out"),
        TimeoutError("no rows within 5 s"),
    ],
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    def body() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        Bare(body).run()
    assert raised.value is error


@pytest.mark.parametrize("stopping", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_is_begun_when_the_driver_has_what_it_covers(rank: int, stopping: bool) -> None:
    """On rank 0 alone: the others wait for it in the collective of saving."""
    done: list[str] = []

    def asked(method: Any, *args: Any) -> None:
        assert args[0] == 4
        done.append(method.__name__)

    class Saving(Loop):
        def __init__(self) -> None:
            self.rank, self.version, self.config = rank, 4, Config()
            self._store = SimpleNamespace(wait=asked, call=asked)  # type: ignore[assignment]
            self.learners, self.kl = [], None
            self.saver = SimpleNamespace(save=lambda *_: done.append("saved"))

    Saving()._save(stopping)
    # A run that was asked to stop does not wait for its last validation.
    first = "wait_version" if stopping else "wait_validated"
    calls = [first, "is_validated", "flush_events", "end_of_iteration"] if rank == 0 else []
    assert done == [*calls, "saved"]


class Partwise(Loop):
    """A loop with one learner that only records what it gets."""

    def __init__(self, tables: list[pa.Table | None]) -> None:
        self.config, self.version = Config(), 4
        self.log: list[str] = []
        self.critic, self.actor = None, self  # type: ignore[assignment]
        self.needs_old_log_probs = True
        self.rank = 1
        self.record = SimpleNamespace(old_log_probs=self._record)  # type: ignore[assignment]
        self.feed = SimpleNamespace(parts=len(tables), next=self._next)  # type: ignore[assignment]
        self._tables = tables

    def _record(self, rows: pa.Table, iteration: int, rank: int, old_log_probs: list[float]) -> None:
        self.log.append(f"record {iteration}.{rank} {len(rows)} {old_log_probs}")

    def _next(self, iteration: int, part: int) -> pa.Table | None:
        self.log.append(f"wait {iteration}.{part}")
        return self._tables[part]


class LoggedUpdate:
    """Stands in for `StreamedUpdate`."""

    def __init__(self, learner: Any, parts: int) -> None:
        self.learner, self._log = learner, learner.log
        self.rows = SimpleNamespace(old_log_probs=[-1.5])

    def add(self, rows: pa.Table) -> None:
        self._log.append(f"add {rows['policy_version'].to_pylist()}")

    def finish(self) -> Stats:
        self._log.append("finish")
        return {"actor/parts": mean(1, 1)}


def chunk(*versions: int) -> pa.Table:
    rows = {"iteration": [5] * len(versions), "policy_version": list(versions)}
    return pa.Table.from_pydict(rows, schema=pa.schema([SCHEMA.field(name) for name in rows]))


@pytest.fixture
def only_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.train.loop.StreamedUpdate", LoggedUpdate)
    monkeypatch.setattr("pipeline.train.loop.TrainBatch", SimpleNamespace(from_table=lambda table: table))
    monkeypatch.setattr("pipeline.train.loop.dist", SimpleNamespace(barrier=lambda: None))


@pytest.mark.usefixtures("only_the_loop")
def test_a_part_is_trained_on_before_the_next_one_is_waited_for() -> None:
    loop = Partwise([chunk(4, 3), chunk(2)])
    timings: Stats = {}
    updated = loop._update(timings)
    assert updated is not None and "actor/parts" in updated[1][0]
    assert loop.log == ["wait 5.0", "add [4, 3]", "wait 5.1", "add [2]", "finish", "record 5.1 3 [-1.5]"]
    assert list(timings) == ["timing_s/gen"]
    assert Partwise([None])._update({}) is None


def test_blocks_of_one_name_add_up() -> None:
    timings: Stats = {}
    for _ in range(3):
        with timed(timings, "gen"):
            time.sleep(0.02)
    assert 0.06 <= timings["timing_s/gen"].values[0] < 0.5
