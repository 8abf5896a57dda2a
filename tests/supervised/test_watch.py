"""The driver of a supervised run, with a stand-in for Ray: events become records, signals stop the run."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from pipeline.config.supervised import SFTConfig
from pipeline.storage.fingerprints import Fingerprints
from pipeline.store.events import CheckpointSaved, Event, IterationTrained, Noted, TrainingEnded, Trouble
from pipeline.supervised import driver
from pipeline.supervised.driver import Training
from pipeline.supervised.folder import Beginning
from pipeline.supervised.plan import SupervisedPlan
from pipeline.supervised.sft import SFTLoop
from pipeline.track.history import read_history
from pipeline.track.loggers import TrackedRun
from pipeline.track.tracker import Tracker
from tests.storage.test_checkpoints import written

Step = Event | type[KeyboardInterrupt]


class Workers:
    """The train workers and their actor: what `read` answers, one step at a time; Ctrl-C comes while it is called."""

    def __init__(self, steps: list[Step], error: Exception | None = None):
        self._steps, self._error, self.read_before = steps, error, 0
        self._over = threading.Event()
        self.stopped = False

    def fit(self) -> None:
        assert self._over.wait(30)
        if self._error is not None:
            raise self._error

    def read(self, after: int, timeout: float) -> tuple[int, list[Event]]:
        while self._steps:
            step = self._steps.pop(0)
            if not self._steps:
                self._over.set()
            if step is KeyboardInterrupt:
                raise KeyboardInterrupt
            self.read_before += 1
            return self.read_before, [step]  # type: ignore[list-item]
        self._over.set()
        return self.read_before, []

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, Training, Workers]]:
    """Run with the steps of the workers; returns how it ended."""
    out = tmp_path / "out"

    def start(*steps: Step, error: Exception | None = None, lost: str | None = None) -> tuple[str, Training, Workers]:
        workers = Workers([*steps], error)
        actor = SimpleNamespace(read=SimpleNamespace(remote=workers.read), stop=SimpleNamespace(remote=workers.stop))
        stand_in = SimpleNamespace(
            remote=lambda kind: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: actor)),
            get=lambda answer, timeout: answer,
            get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "0" * 56),
            exceptions=ray.exceptions,
        )
        monkeypatch.setattr(driver, "ray", stand_in)
        monkeypatch.setattr(Training, "_trainer", lambda *_: workers)
        config = SFTConfig(out=str(out))
        config.trainer.max_ckpt_to_keep = 1
        tracker = Tracker(TrackedRun(out, {}, "a project", "out"), 3, ["console"], unit="step")
        tracker.start()
        plan, begin = SupervisedPlan(config, 24, 0, 3, 1, None), Beginning(False, None, Fingerprints())
        training = Training(SFTLoop, plan, [], [], begin, tracker, lambda: lost)
        try:
            return training.run(out), training, workers
        finally:
            tracker.finish("failed")

    return start


def trained(step: int, loss: float = 1.0) -> IterationTrained:
    return IterationTrained(step, {"loss": loss})


def printed(tmp_path: Path) -> str:
    return (tmp_path / "out" / "console.log").read_text()


def test_events_become_records(tmp_path: Path, train: Any) -> None:
    for step in (1, 2):
        written(tmp_path / "out", step, ranks=1)
    events = [Noted("eager"), trained(1, 2.0), CheckpointSaved(1, 0, 1), trained(2), CheckpointSaved(2, 0, 1)]
    status, training, workers = train(*events, Trouble("slow"), trained(3, 0.5), TrainingEnded(3, False))
    assert status == "finished" and training.metrics == {"step": 3, "loss": 0.5} and not workers.stopped
    assert [record["loss"] for record in read_history(tmp_path / "out" / "metrics.jsonl")] == [2.0, 1.0, 0.5]
    assert (tmp_path / "out" / "config.yaml").is_file() and (tmp_path / "out" / "fingerprints.json").is_file()
    lines = printed(tmp_path).splitlines()
    assert lines[:2] == ["out: starting the workers", "out: note: eager"] and "out: slow" in lines
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["iteration_000002"]


def test_ctrl_c_before_the_first_step_ends_at_once(tmp_path: Path, train: Any) -> None:
    status, _, workers = train(KeyboardInterrupt, trained(1))
    assert status == "interrupted" and not workers.stopped
    assert "stopped before the first step of this start, so nothing is lost" in printed(tmp_path)


def test_ctrl_c_stops_after_the_step(tmp_path: Path, train: Any) -> None:
    status, training, workers = train(trained(1), KeyboardInterrupt, trained(2), TrainingEnded(2, True))
    assert status == "interrupted" and workers.stopped and training.metrics["step"] == 2
    assert "stopping after this step; Ctrl-C again ends the run at once" in printed(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(trained(1), KeyboardInterrupt, KeyboardInterrupt, trained(2))


def test_a_stop_in_the_last_step_is_a_finished_run(train: Any) -> None:
    assert train(trained(2), KeyboardInterrupt, trained(3), TrainingEnded(3, False))[0] == "finished"


def test_an_error_of_the_workers_is_the_reason(train: Any) -> None:
    status, training, _ = train(trained(1), error=RuntimeError("the gradient norm is nan"))
    assert status == "failed" and training.problem == "RuntimeError: the gradient norm is nan"
    status, training, _ = train(trained(1))
    assert status == "failed" and training.problem == "the train workers ended without a word"


def test_records_that_cannot_be_written_stop_the_run(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Tracker, "log", full)
    status, training, workers = train(trained(1), trained(2), TrainingEnded(2, True))
    assert status == "failed" and workers.stopped
    assert training.problem.startswith("the run's records cannot be written: [Errno 28]")


def test_a_lost_folder_ends_the_run(train: Any) -> None:
    status, training, _ = train(trained(1), lost="the folder is another process's")
    assert status == "failed" and training.problem == "the folder is another process's"
