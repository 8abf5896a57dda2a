"""Errors of the train loop that say what was waited for."""

import errno
import socket
import time
from collections.abc import Callable
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
from pipeline.models.settings import FILE
from pipeline.stats import Stats, mean
from pipeline.store.status import StoreStatus
from pipeline.train.checkpoint import NotStored
from pipeline.train.loop import Loop
from pipeline.train.report import CollectiveTimeout, timed
from pipeline.train.setup import build_actor
from tests.train.updates import CPU, make_config, spawn

STATUS = StoreStatus(1, 0, 3, False, {"admission": 2}, 7.0, "train rank 1 (publishing version 3)")


class Bare(Loop):
    """A loop of which only `run` is real."""

    def __init__(self, body: Any):
        self.config, self.rank, self.version, self._body = Config(), 0, 3, body
        self.config.trainer.deadlines.collective = 2.0
        store: Any = SimpleNamespace(ask=lambda method: STATUS)
        self._store = store

    def _run(self) -> Any:
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
    text = (tmp_path / "text").read_text()
    assert text.startswith("collective: train rank 0 waited longer than 2 s (trainer.deadlines.collective)")
    assert "2 in admission" in text and "train rank 1 (publishing version 3)" in text


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

    loop: Any = Loop.__new__(Loop)
    loop.rank, loop.version, loop.config, loop.learners, loop.kl = rank, 4, Config(), [], None
    loop._store = SimpleNamespace(wait=asked, call=asked)
    loop.saver = SimpleNamespace(save=lambda *_: done.append("saved"))
    loop._save(stopping)
    # A run that was asked to stop does not wait for its last validation.
    first = "wait_version" if stopping else "wait_validated"
    calls = [first, "is_validated", "flush_events", "end_of_iteration"] if rank == 0 else []
    assert done == [*calls, "saved"]


def test_a_part_is_trained_on_before_the_next_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    parts = [pa.table({"row": [1, 2]}), pa.table({"row": [3]})]

    class LoggedUpdate:
        """Stands in for `StreamedUpdate`."""

        def __init__(self, learner: Any, parts: int) -> None:
            self.learner, self.rows = learner, SimpleNamespace(old_log_probs=[-1.5])

        def add(self, rows: pa.Table) -> None:
            log.append(f"add {rows['row'].to_pylist()}")

        def finish(self) -> Stats:
            return {"actor/parts": mean(1, 1)}

    def wait(iteration: int, part: int) -> pa.Table | None:
        log.append(f"wait {iteration}.{part}")
        return parts[part] if parts else None

    def record(rows: pa.Table, iteration: int, rank: int, old_log_probs: list[float]) -> None:
        log.append(f"record {iteration}.{rank} {rows['row'].to_pylist()} {old_log_probs}")

    def dealt(rows: pa.Table) -> pa.Table:
        return pa.table({"row": [10 * row for row in rows["row"].to_pylist()]})

    monkeypatch.setattr("pipeline.train.loop.StreamedUpdate", LoggedUpdate)
    monkeypatch.setattr("pipeline.train.loop.TrainBatch", SimpleNamespace(from_table=lambda table: table))
    monkeypatch.setattr("pipeline.train.loop.ranks", SimpleNamespace(all_gather=lambda value: [value]))
    loop: Any = Loop.__new__(Loop)
    loop.config, loop.version, loop.rank, loop.critic = Config(), 4, 1, None
    loop.handshake = SimpleNamespace(due=False)
    loop.actor = SimpleNamespace(needs_old_log_probs=True, leads=True)
    loop.record = SimpleNamespace(old_log_probs=record)
    loop.feed, loop.deal = SimpleNamespace(parts=2, next=wait), dealt
    monkeypatch.setattr("pipeline.train.loop.sequence_balance", lambda rows: {"rows": rows["row"].to_pylist()})
    timings: Stats = {}
    rows, stats = loop._update(timings)
    # What is trained and recorded are the rows that were dealt; metrics of whole groups are of those that came.
    assert rows["row"].to_pylist() == [1, 2, 3] and "actor/parts" in stats[0] and stats[1] == {"rows": [10, 20, 30]}
    assert list(timings) == ["timing_s/gen", "timing_s/balance"]
    assert log == ["wait 5.0", "add [10, 20]", "wait 5.1", "add [30]", "record 5.1 [10, 20, 30] [-1.5]"]
    parts.clear()
    assert loop._update({}) is None


def test_engines_start_after_the_first_version_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream, and with it the engines, starts when the first block is asked for."""
    log: list[str] = []

    def shard(name: str) -> Any:
        log.append(f"rows of {name}")
        return SimpleNamespace(iter_batches=lambda **_: iter([]))

    monkeypatch.setattr("pipeline.train.loop.ray.train.get_dataset_shard", shard)
    monkeypatch.setattr("pipeline.train.loop.ranks", SimpleNamespace(barrier=lambda: log.append("all ranks")))
    loop: Any = Loop.__new__(Loop)
    loop.config, loop.world_size, loop.device = Config(), 1, torch.device("cpu")
    loop.schedule, loop._describe = SimpleNamespace(chunks_per_iteration=2), str
    loop._publish = lambda: log.append("publish")
    loop.actor = loop.critic = None
    loop.handshake, loop._greeting = SimpleNamespace(due=True), lambda: [log.append("ask for rows to compare")]
    loop._shake_hands = lambda greeting: log.append("handshake")
    monkeypatch.setattr("pipeline.train.loop.Dealer", SimpleNamespace(of=lambda *_: None))
    loop._begin()
    assert log == ["publish", "all ranks", "rows of rollouts", "ask for rows to compare", "handshake"]


def test_blocks_of_one_name_add_up() -> None:
    timings: Stats = {}
    for _ in range(3):
        with timed(timings, "gen"):
            time.sleep(0.02)
    assert 0.06 <= timings["timing_s/gen"].values[0] < 5.0


class Storing(Bare):
    """A loop whose run ends with a checkpoint that could not be stored, or with the model; real is how it is saved."""

    def __init__(self, model: Path, run_dir: Path, staging: Path, body: Any):
        super().__init__(body)
        settings = make_config(model)
        self.config.model, self.run_dir = settings.model, str(run_dir)
        self.actor = build_actor(settings, CPU, 10)
        self.saver: Any = SimpleNamespace(staging=str(staging))


@pytest.fixture
def storing(tmp_path: Path, tiny_model: Path) -> Callable[..., Storing]:
    """Makes a loop; without `in_run` the run's folder can hold no model."""

    def make(in_run: bool, body: Any) -> Storing:
        (tmp_path / "runs" / "a").mkdir(parents=True)
        (tmp_path / "tmp").mkdir()
        if not in_run:
            (tmp_path / "runs" / "a").rmdir()
            (tmp_path / "runs" / "a").write_text("no folder")
        return Storing(tiny_model, tmp_path / "runs" / "a", tmp_path / "tmp", body)

    return make


def not_stored() -> None:
    raise NotStored("checkpoint: /store could not be written for 60 s: No space left on device")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("in_run", [True, False], ids=["in the run's folder", "elsewhere"])
def test_a_checkpoint_that_cannot_be_stored_ends_the_run_with_its_model(
    storing: Callable[..., Storing], tmp_path: Path, in_run: bool
) -> None:
    loop = storing(in_run, not_stored)
    with pytest.raises(FinalError) as error:
        loop.run()
    (weights,) = tmp_path.glob("**/model.safetensors")
    folder = weights.parent
    assert str(folder).startswith(str(tmp_path / "runs" / "a" / "model" if in_run else tmp_path / "tmp" / "a-model-"))
    assert str(error.value).startswith("checkpoint: /store could not be written for 60 s: No space left on device")
    assert str(error.value).endswith(f". The model is in {folder} (on {socket.gethostname()})")
    assert ("Then the model could not be saved in" in str(error.value)) is not in_run
    assert (folder / FILE).is_file()


@pytest.mark.usefixtures("one_rank")
def test_a_model_that_can_be_saved_nowhere_is_said_with_all_reasons(
    storing: Callable[..., Storing], tmp_path: Path
) -> None:
    loop = storing(False, not_stored)
    (tmp_path / "tmp").rmdir()
    (tmp_path / "tmp").write_text("no folder")
    with pytest.raises(FinalError) as error:
        loop.run()
    assert str(error.value).count("the model could not be saved in") == 2 and "The model is in" not in str(error.value)


@pytest.mark.usefixtures("one_rank")
def test_the_end_of_a_run_is_tried_at_its_start(
    storing: Callable[..., Storing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, run_dir = storing(True, not_stored), tmp_path / "runs" / "a"
    with pytest.raises(FinalError, match=f"^{run_dir} is not on the node {socket.gethostname()}, which trains; set"):
        loop._try_to_save()
    (run_dir / "config.yaml").write_text("written by the driver")
    loop._try_to_save()
    assert [path.name for path in run_dir.iterdir()] == ["config.yaml"]
    (run_dir / "model").write_text("no folder")
    with pytest.raises(FinalError, match=f"could not be saved in {run_dir}/model at the end: it is a file"):
        loop._try_to_save()
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only")))
    (run_dir / "model").unlink()
    with pytest.raises(FinalError, match="model at the end: Read-only"):
        loop._try_to_save()


SENTENCE = (
    "the trajectories cannot be written to /run/a.parquet (No space left on device); free space there, allow writing, "
    "or choose another folder with `trainer.default_local_dir`"
)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("place", ["engine", "trainer"])
def test_rows_that_cannot_be_recorded_end_the_run_with_its_model(
    storing: Callable[..., Storing], tmp_path: Path, place: str
) -> None:
    """The error of an engine comes as the text of Ray's own. What may pass by itself restarts the workers."""

    def meet(error: Exception) -> None:
        with loop._recorded():
            raise error

    def full() -> None:
        ours = OSError(errno.ENOSPC, SENTENCE)
        meet(ours if place == "trainer" else RuntimeError(f"ray::MapBatches()\n{SENTENCE}\n"))

    loop = storing(True, full)
    with pytest.raises(FinalError) as error:
        loop.run()
    assert str(error.value).startswith(f"{SENTENCE}. The model is in {tmp_path}/runs/a/model (on ")
    assert (tmp_path / "runs" / "a" / "model" / "model.safetensors").is_file()
    for passing in (OSError(errno.EIO, SENTENCE.replace("No space left on device", "away")), ValueError("other")):
        with pytest.raises(type(passing)) as raised:
            meet(passing)
        assert raised.value is passing


def test_a_rank_ends_with_another_one_whose_rows_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.train.loop.ranks", SimpleNamespace(all_gather=lambda value: [value, SENTENCE]))
    with pytest.raises(NotStored, match="^the trajectories cannot be written"), Bare(None)._recorded():
        pass


def test_work_is_reported_now_and_then_by_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [100.0], list[Any]()
    monkeypatch.setattr("pipeline.train.loop.time", SimpleNamespace(monotonic=lambda: now[0]))
    loop = Bare(None)
    store: Any = SimpleNamespace(tell=lambda method, party: told.append((method.__name__, party)))
    loop._store, loop._beaten_at = store, 0.0
    for second in range(40):
        now[0] = 100.0 + second
        loop._beat("actor")
    assert told == [("beat", "train rank 0 (the actor in iteration 4)")] * 3
    loop.rank = 1
    loop._beaten_at = 0.0
    loop._beat("actor")
    assert len(told) == 3
