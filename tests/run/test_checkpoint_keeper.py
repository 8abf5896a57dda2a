"""Which checkpoints the driver keeps, as parts become whole and numbers come in."""

import json
import threading
import time
from pathlib import Path

import pytest

from pipeline.run.checkpoint_keeper import CheckpointKeeper
from pipeline.storage import checkpoints
from pipeline.storage.checkpoints import iterations
from tests.storage.test_checkpoints import written

METRIC = "val-core/countdown/acc/mean@1"


def saved(keeper: CheckpointKeeper, run_dir: Path, iteration: int) -> None:
    written(run_dir, iteration)
    for rank in (1, 0):
        keeper.saved(iteration, rank, 2)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(tmp_path, 2, None, "max", str(tmp_path))
    for iteration in (1, 2, 3, 4):
        saved(keeper, tmp_path, iteration)
        keeper.record(iteration, {METRIC: 1.0 / iteration})
    keeper.close()
    assert iterations(str(tmp_path)) == [3, 4] and not (tmp_path / "best.json").exists()


def test_the_best_stays_too(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(tmp_path, 1, METRIC, "max", str(tmp_path))
    for iteration, value in ((0, 0.9), (2, 0.3), (4, 0.5), (6, 0.4), (8, 0.5)):
        if iteration:
            saved(keeper, tmp_path, iteration)
        keeper.record(iteration, {METRIC: value})
        keeper.record(iteration + 1, {"critic/score/mean": 1.0})
    keeper.close()
    assert iterations(str(tmp_path)) == [4, 8]
    assert json.loads((tmp_path / "best.json").read_text()) == {"iteration": 4, "metric": METRIC, "value": 0.5}
    # A run that goes on knows its past.
    again = CheckpointKeeper(tmp_path, 1, METRIC, "max", str(tmp_path))
    for iteration, value in ((4, 0.5), (8, 0.5)):
        again.record(iteration, {METRIC: value})
    saved(again, tmp_path, 10)
    again.record(10, {METRIC: 0.2})
    again.close()
    assert iterations(str(tmp_path)) == [4, 10]


def test_the_best_may_be_the_smallest(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(tmp_path, 1, METRIC, "min", str(tmp_path))
    for iteration, value in ((2, 0.3), (4, 0.5), (6, 0.4)):
        saved(keeper, tmp_path, iteration)
        keeper.record(iteration, {METRIC: value})
    keeper.close()
    assert iterations(str(tmp_path)) == [2, 6]


def test_a_part_is_no_checkpoint(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(tmp_path, 1, None, "max", str(tmp_path))
    saved(keeper, tmp_path, 2)
    written(tmp_path, 4, marks=1)
    keeper.saved(4, 0, 2)
    keeper.close()
    assert iterations(str(tmp_path)) == [2, 4]


def test_parts_from_before_a_restart_make_nothing_whole(tmp_path: Path) -> None:
    """Else a checkpoint that is being copied anew would be taken for a broken one, and deleted."""
    keeper = CheckpointKeeper(tmp_path, 1, None, "max", str(tmp_path))
    saved(keeper, tmp_path, 2)
    keeper.saved(4, 0, 2)
    keeper.forget_after(2)
    written(tmp_path, 4, marks=1)
    keeper.saved(4, 1, 2)
    keeper.close()
    assert iterations(str(tmp_path)) == [2, 4]


def test_what_came_after_the_start_is_not_whole(tmp_path: Path) -> None:
    """Else the one that is being copied would go as one that was left incomplete, and the one before it as too old."""
    for iteration in (2, 4, 8):
        written(tmp_path, iteration, marks=1 if iteration == 8 else None)
    keeper = CheckpointKeeper(tmp_path, 1, METRIC, "max", str(tmp_path))
    keeper.forget_after(4)
    written(tmp_path, 6, marks=1)
    for iteration in (4, 5):
        keeper.record(iteration, {METRIC: 0.5})
    keeper.close()
    assert iterations(str(tmp_path)) == [4, 6, 8]


def test_a_storage_that_hangs_holds_up_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(checkpoints, "retain", lambda *_: [released.wait(30)])
    monkeypatch.setattr(CheckpointKeeper, "CLOSE_S", 0.1)
    keeper = CheckpointKeeper(tmp_path, 1, None, "max", str(tmp_path))
    saved(keeper, tmp_path, 2)
    begun = time.monotonic()
    keeper.close()
    assert time.monotonic() - begun < 20
    released.set()


def test_a_metric_that_no_validation_reports_is_told_and_keeps_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = CheckpointKeeper(tmp_path, 1, "val-core/countdown/mean@1", "max", str(tmp_path))
    for iteration in (1, 2, 3):
        saved(keeper, tmp_path, iteration)
        keeper.record(iteration, {"critic/score/mean": 1.0})
        keeper.record(iteration, {METRIC: 0.5, "critic/score/mean": 1.0})
    keeper.close()
    assert iterations(str(tmp_path)) == [3] and not (tmp_path / "best.json").exists()
    (told,) = [record.getMessage() for record in caplog.records]
    assert "iteration 1 has no trainer.best_metric=val-core/countdown/mean@1" in told and told.endswith(f"has {METRIC}")


def test_none_is_kept_once_the_run_has_finished(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(tmp_path, 0, None, "max", str(tmp_path))
    for iteration in (1, 2):
        saved(keeper, tmp_path, iteration)
    keeper.close()
    assert iterations(str(tmp_path)) == [2], "a run that ends early can continue"
    for keep, metric, left in ((1, None, [2]), (0, METRIC, [2]), (0, None, [])):
        again = CheckpointKeeper(tmp_path, keep, metric, "max", str(tmp_path))
        again.record(2, {METRIC: 0.5})
        again.finished()
        again.close()
        assert iterations(str(tmp_path)) == left
