"""`metrics.jsonl` stays one readable object per iteration through kills, resumes and full disks."""

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline.track import history
from pipeline.track.history import History, read_history, validation_scores


def _iterations(path: Path) -> list[int]:
    return [record["iteration"] for record in read_history(path)]


def test_one_strict_json_object_per_iteration(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    written = History(path, resume=False)
    written.append(0, {"a": np.float32(0.5), "count": np.int64(3)})
    written.append(1, {"a": math.nan, "b": math.inf})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [list(line)[:3] for line in lines] == [["iteration", "time", "elapsed_s"]] * 2
    assert lines[0]["a"] == 0.5 and lines[0]["count"] == 3
    assert lines[1]["a"] is None and lines[1]["b"] is None
    assert abs(lines[0]["time"] - time.time()) < 60


@pytest.mark.parametrize("source", ["", "a/b", "数学", "a\nb", "x/acc/mean@1"])
def test_validation_of_any_source_is_found(source: str) -> None:
    assert validation_scores({f"val-core/{source}/acc/mean@1": 0.5, f"val-core/{source}/acc/best@1/mean": 1}) == {
        source: 0.5
    }


def test_resume_continues_and_drops_iterations_done_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = History(path, resume=False)
    for iteration in range(6):
        first.append(iteration, {"value": iteration})
    resumed = History(path, resume=True)
    assert _iterations(path) == [0, 1, 2, 3, 4, 5]
    resumed.append(4, {"value": 40})
    assert _iterations(path) == [0, 1, 2, 3, 4]
    assert read_history(path)[-1]["value"] == 40
    resumed.append(5, {"value": 50})
    assert [record["iteration"] for record in resumed.records] == _iterations(path) == [0, 1, 2, 3, 4, 5]


def test_metrics_of_an_earlier_version_have_their_current_names(tmp_path: Path) -> None:
    old = {"iteration": 1, "timing_s/deal": 2.0, "agent/ended/done": 0.5, "val-agent/ended/error": 0.25, "a/ended/b": 1}
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(old) + "\n")
    new = ["iteration", "timing_s/balance", "agent/stop_reason/done", "val-agent/stop_reason/error", "a/ended/b"]
    assert read_history(path) == [dict(zip(new, old.values(), strict=True))]
    # A run that goes on has one name for each metric.
    assert History(path, resume=True).records == [json.loads(path.read_text())] == read_history(path)


def test_elapsed_continues_where_the_last_run_stopped_and_a_new_run_empties_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 3, "time": 1.0, "elapsed_s": 500.0}\n')
    assert 500.0 <= History(path, resume=True).append(4, {})["elapsed_s"] < 510.0
    History(path, resume=False)
    assert path.read_text() == ""


def test_torn_last_line_is_skipped_then_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "a": 1.0}\n{"iteration": 2, "a"')
    assert _iterations(path) == [1]
    History(path, resume=True).append(2, {"a": 2.0})
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2]


def test_damage_before_the_last_line_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\nnonsense\n{"iteration": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_history(path)
    path.write_text('{"iteration": 1}\n[2]\n')
    with pytest.raises(ValueError, match=r"line 2 is not an object"):
        read_history(path)


def test_killed_while_writing_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys; from pathlib import Path; from pipeline.track.history import History\n"
        "h = History(Path(sys.argv[1]), resume=False)\n"
        "for i in range(10**9): h.append(i, {f'metric/{n}': n / 7 for n in range(300)})\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        until = time.monotonic() + 30
        while (not path.exists() or path.stat().st_size < 100_000) and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    iterations = _iterations(path)
    assert len(iterations) > 5 and iterations == list(range(len(iterations)))
    assert all(len(record) == 303 for record in read_history(path))


def test_full_disk_names_the_file_and_keeps_earlier_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    written = History(path, resume=False)
    written.append(1, {"a": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(history.os, "fsync", full)
    with pytest.raises(OSError, match=r"metrics\.jsonl \(No space left on device\); free space") as caught:
        written.append(2, {"a": 2})
    assert caught.value.errno == 28
    monkeypatch.undo()
    assert path.read_text().endswith("\n") and _iterations(path) == [1]
    written.append(2, {"a": 2})
    assert _iterations(path) == [1, 2]


@pytest.mark.parametrize("metrics", [{"a": "text"}, {"a": None}, {"iteration": 3}])
def test_what_is_no_metric_is_refused(tmp_path: Path, metrics: dict) -> None:
    written = History(tmp_path / "metrics.jsonl", resume=False)
    with pytest.raises(ValueError, match=f"metric '{next(iter(metrics))}'"):
        written.append(1, metrics)
    assert _iterations(written.path) == []


def test_validation_scores_take_mean_at_the_most_samples() -> None:
    metrics = {
        "val-core/countdown/reward/mean@1": 0.25,
        "val-core/openai/gsm8k/reward/mean@2": 0.5,
        "val-core/openai/gsm8k/reward/mean@16": 0.75,
        "val-core/openai/gsm8k/reward/best@16/mean": 0.9,
        "val-aux/countdown/reward/std@1": 0.1,
        "critic/score/mean": 0.3,
    }
    assert validation_scores(metrics) == {"countdown": 0.25, "openai/gsm8k": 0.75}
