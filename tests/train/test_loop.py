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
from pipeline.track.metrics import Stats, mean
from pipeline.train.loop import CollectiveTimeout, Loop, timed
from tests.train.updates import spawn

STATUS = {"version": 3, "waiting": {"admission": 2}, "alive_s": 7.0, "alive_by": "train rank 1 (publishing version 3)"}


class Bare(Loop):
    """A loop of which only the end of `_run` is real."""

    def __init__(self, body: Any):
        self.config, self.rank, self.version, self._body = Config(), 0, 3, body
        self.config.trainer.deadlines.collective = 2.0

    def _run(self) -> dict[str, Any]:
        return self._body()

    def _ask_store(self, method: str, *args: Any) -> Any:
        assert method == "status"
        return STATUS


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
        "3; policy version 3 is out, store waits: 2 in admission, last sign of life 7 s ago from train rank 1 "
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


def test_a_checkpoint_is_begun_when_the_driver_has_what_it_covers() -> None:
    """On rank 0 alone: the others wait for it in the collective of saving."""
    for rank in (0, 1):
        done: list[str] = []

        class Saving(Loop):
            def __init__(self) -> None:
                self.rank, self.version, self._generation = rank, 4, 9  # noqa: B023
                self._store, self.config = SimpleNamespace(), Config()
                self.learners, self.kl = [], None
                self.saver = SimpleNamespace(save=lambda *_: done.append("saved"))  # noqa: B023

            def _ask(self, method: str, *args: Any) -> Any:
                return None

            def _wait(self, method: str, *args: Any) -> None:
                assert (method, args[0]) == ("reach", 4)
                done.append("validated")  # noqa: B023

        def settle(store: Any, method: str, generation: int, version: int, patience: float, *, timeout: float) -> None:
            assert (method, generation, version) == ("settle", 9, 4) and timeout > patience
            done.append("settled")  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pipeline.train.loop.ask", settle)
            Saving()._save()
        assert done == (["validated", "settled", "saved"] if rank == 0 else ["saved"])


class Chunkwise(Loop):
    """A loop that trains as rows come, with learners that only say what they get."""

    def __init__(self, chunks: list[pa.Table | None], early: bool, **algorithm: Any) -> None:
        self.config, self.version = Config(), 4
        self.said: list[str] = []
        for name, value in algorithm.items():
            setattr(self.config.algorithm, name, value)
        self.critic, self.actor, self.early = None, SimpleNamespace(update=self._whole), early  # type: ignore[assignment]
        self.feed = SimpleNamespace(chunks=2, next=self._next, chunk=self._chunk)  # type: ignore[assignment]
        self._blocks = iter(chunks)

    def _chunk(self, iteration: int, number: int) -> pa.Table | None:
        self.said.append(f"wait {iteration}.{number}")
        return next(self._blocks)

    def _next(self, iteration: int) -> pa.Table | None:
        tables = list(self._blocks)
        return None if None in tables else pa.concat_tables(tables)

    def _whole(self, rows: pa.Table) -> Stats:
        self.said.append(f"all {rows['response_mask'].to_pylist()}")
        return {"actor/whole": mean(1, 1)}


class Said:
    """Stands in for `EarlyUpdate`."""

    def __init__(self, learner: Any, chunks: int) -> None:
        self._said = learner.update.__self__.said
        assert chunks == 2

    def add(self, rows: pa.Table) -> None:
        self._said.append(f"part {rows['response_mask'].to_pylist()}")

    def finish(self) -> Stats:
        self._said.append("finish")
        return {"actor/parts": mean(1, 1)}


def chunk(*versions: int) -> pa.Table:
    rows = {"iteration": [5] * len(versions), "policy_version": list(versions), "response_mask": [[1]] * len(versions)}
    return pa.Table.from_pydict(rows, schema=pa.schema([SCHEMA.field(name) for name in rows]))


@pytest.fixture
def only_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.train.loop.EarlyUpdate", Said)
    monkeypatch.setattr("pipeline.train.loop.Rows", SimpleNamespace(from_table=lambda table: table))
    monkeypatch.setattr("pipeline.train.loop.dist", SimpleNamespace(barrier=lambda: None))


@pytest.mark.usefixtures("only_the_loop")
def test_a_chunk_is_trained_on_before_the_next_one_is_waited_for() -> None:
    loop = Chunkwise([chunk(4, 3), chunk(4)], early=True, max_staleness=1)
    timings: Stats = {}
    updated = loop._update_early(timings)
    assert updated is not None and len(updated[0]) == 3 and "actor/parts" in updated[1][0]
    assert loop.said == ["wait 5.0", "part [[1], [1]]", "wait 5.1", "part [[1]]", "finish"]
    assert list(timings) == ["timing_s/gen"]
    assert Chunkwise([None], early=True)._update_early({}) is None


@pytest.mark.usefixtures("only_the_loop")
def test_rows_past_the_bound_train_nothing_whole_or_in_parts() -> None:
    for early in (True, False):
        loop = Chunkwise([chunk(4, 3), chunk(2)], early=early, max_staleness=1)
        updated = loop._update_early({}) if early else loop._update({})
        assert updated is not None and updated[0]["response_mask"].to_pylist() == [[1], [1], [0]]
        assert loop.said[-1] == ("finish" if early else "all [[1], [1], [0]]")


def test_blocks_of_one_name_add_up() -> None:
    timings: Stats = {}
    for _ in range(3):
        with timed(timings, "gen"):
            time.sleep(0.02)
    assert 0.06 <= timings["timing_s/gen"].values[0] < 0.5
