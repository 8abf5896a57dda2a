"""The whole tracker: MLflow on SQLite and TensorBoard for real, a dead server, loggers that cannot work."""

import importlib.util
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.track.history import read_history
from pipeline.track.loggers import TrackedRun, check_loggers
from pipeline.track.mlflow_logger import NAME_LENGTH, mlflow_name
from pipeline.track.tracker import Tracker

CONFIG: dict[str, Any] = {
    "actor": {"optim": {"lr": 1e-6}},
    "model": {"path": "m" * 7000},
    "trainer": {"env_vars": {"HF_TOKEN": "secret-value"}, "total_training_steps": 2},
    "data.train_files": ["train.parquet", "s3://bucket/train"],
    "algorithm.adv_estimator": "grpo",
    "actor.policy_loss.loss_mode": "vanilla",
    "many": {f"key{number}": number for number in range(150)},
}
VALIDATION = "val-core/countdown/reward/mean@1"


def _tracker(
    folder: Path, loggers: list[str], config: dict[str, Any] = CONFIG, resume: bool = False, **options: Any
) -> Tracker:
    run = TrackedRun(folder / "run", config, "a project", "a run", resume, command="slipstream train seed=1")
    return Tracker(run, 2, loggers, **options)


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)


def test_mlflow_on_sqlite_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    tracker = _tracker(tmp_path, ["mlflow"])
    tracker.start()
    tracker.log(0, {VALIDATION: 0.25})
    tracker.log(1, {"critic/score/mean": 0.5, "bad": float("nan")})
    rows = [{"extra": 2, "score": 1.0, "response": "r" * 9000, "ground_truth": "4", "prompt": "p"}, {"prompt": "q"}]
    tracker.samples(1, rows)
    assert tracker.finish("interrupted") == []
    assert tracker.finish("finished") == []

    run_dir = tmp_path / "run"
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    run_id = (run_dir / "mlflow_run_id").read_text().strip()
    run = client.get_run(run_id)
    assert run.info.status == "KILLED" and run.info.run_name == "a run"
    assert client.get_experiment(run.info.experiment_id).name == "a project"
    assert run.data.params["actor.optim.lr"] == "1e-06" and run.data.params["many.key149"] == "149"
    assert len(run.data.params["model.path"]) == 6000
    assert run.data.tags["version.torch"] and run.data.tags["version.ray"]
    assert run.info.user_id == run.data.tags["mlflow.user"] == "ada"
    assert run.data.tags["mlflow.source.name"] == "slipstream train"
    assert run.data.tags["mlflow.note.content"] == "```\nslipstream train seed=1\n```"
    assert (run.data.tags["algorithm"], run.data.tags["loss"]) == ("grpo", "vanilla")
    (point,) = client.get_metric_history(run_id, "val-core/countdown/reward/mean_at_1")
    assert (point.step, point.value) == (0, 0.25)
    assert abs(point.timestamp / 1000 - read_history(tracker.metrics_path)[0]["time"]) < 0.01
    artifacts = tmp_path / "mlartifacts" / run_id / "artifacts"
    assert (artifacts / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    table = json.loads((artifacts / "samples" / "from_iteration_000000.json").read_text())
    assert table["columns"] == ["iteration", "prompt", "response", "ground_truth", "score", "extra"]
    assert len(table["data"]) == 2
    assert table["data"][0][2].endswith("(9000 characters)")
    assert "secret-value" not in (artifacts / "config.yaml").read_text() + str(run.data.params)

    longer = CONFIG | {"trainer": CONFIG["trainer"] | {"total_training_steps": 3}}
    resumed = _tracker(tmp_path, ["mlflow"], longer, resume=True)
    resumed.start()
    resumed.log(1, {"critic/score/mean": 0.75})
    resumed.log(2, {"critic/score/mean": 0.8})
    assert resumed.finish("finished") == []
    assert [record["iteration"] for record in read_history(tracker.metrics_path)] == [0, 1, 2]
    (run,) = client.search_runs([run.info.experiment_id])
    assert run.info.run_id == run_id and run.info.status == "FINISHED"
    assert run.data.metrics["critic/score/mean"] == 0.8
    assert {each.dataset.name for each in run.inputs.dataset_inputs} == {"train.parquet", "train"}
    assert len(run.inputs.dataset_inputs) == 2, "each is an input once"
    assert run.data.params["trainer.total_training_steps"] == "2"
    assert run.data.tags["resumed.trainer.total_training_steps"] == "3"


def test_dead_server_costs_warnings_and_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    tracker = _tracker(tmp_path, ["mlflow"], flush_timeout_s=4.0)
    tracker.start()
    began = time.monotonic()
    for iteration in range(20):
        tracker.log(iteration, {"critic/score/mean": 0.1})
    assert time.monotonic() - began < 30
    (lacking,) = [problem for problem in tracker.finish("finished") if "plot" not in problem]
    assert time.monotonic() - began < 60
    # The start, twenty iterations, one drawing at most and the end.
    assert re.match(r"mlflow lacks records: 2[23] still waited", lacking)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("pipeline.track")]
    assert sum("could not take the start of the run" in message for message in messages) == 1
    assert any("metrics.jsonl" in message for message in messages)
    assert len(read_history(tracker.metrics_path)) == 20


def test_tensorboard_shows_what_a_resumed_run_did(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume, iterations in ((False, [1, 2, 3, 4]), (True, [3, 4])):
        tracker = _tracker(tmp_path, ["tensorboard"], resume=resume)
        tracker.start()
        for iteration in iterations:
            tracker.log(iteration, {"critic/score/mean": iteration + (0.5 if resume else 0.0)})
        assert tracker.finish("finished") == []
        time.sleep(1.1)  # event files are named by the second
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    points = [(point.step, point.value) for point in events.Scalars("critic/score/mean")]
    assert points == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5)]


def test_console_table_and_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = _tracker(tmp_path, ["console"])
    tracker.start()
    tracker.status("starting engines")
    tracker.log(0, {VALIDATION: 0.25})
    tracker.log(1, {VALIDATION: 0.5})
    tracker.finish("finished", {"to continue": "python -m jobs.train resume"})
    out = capsys.readouterr().out
    assert "starting engines" in out and "1/2  " in out
    assert "0.250 → 0.500  +0.250" in out and "learning_curve.png" in out
    assert "python -m jobs.train resume" in out


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    tracker = _tracker(tmp_path, [])
    with pytest.raises(RuntimeError, match="before the tracker's start"):
        tracker.log(1, {})
    with pytest.raises(ValueError, match="finished, interrupted, failed"):
        tracker.finish("done")
    assert tracker.finish("failed") == []


def test_check_loggers_names_the_nearest_and_the_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    check_loggers(["console", "mlflow", "tensorboard"])
    with pytest.raises(ValueError, match="'mlfow'.*did you mean 'mlflow'"):
        check_loggers(["console", "mlfow"])
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "pipeline.track.loggers.importlib.util.find_spec",
        lambda name: None if name == "wandb" else real(name),
    )
    with pytest.raises(ImportError, match=r"pip install wandb"):
        check_loggers(["wandb"])


NAMES = st.one_of(st.text(max_size=300), st.text(alphabet="ab_tx@:/. 3#学\n", max_size=12))


@given(NAMES, NAMES)
def test_mlflow_takes_every_name_and_no_two_become_one(one: str, other: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(mlflow_name(one))
    assert len(mlflow_name(one)) <= NAME_LENGTH
    assert (mlflow_name(one) == mlflow_name(other)) == (one == other)


@pytest.mark.parametrize(
    ("name", "at_mlflow"),
    [
        ("val-core/数学/acc/mean@1", "val-core/数学/acc/mean_at_1"),
        ("reward/form at/mean", "reward/form at/mean"),
        ("reward/form#at/mean", "reward/form:23:at/mean"),
        ("val-core/mean_at_8/acc/mean@8", "val-core/mean:5f:at_8/acc/mean_at_8"),
        ("val-core//acc/mean@1", "val-core:2f:/acc/mean_at_1"),
        ("a/../b", "a/:2e:./b"),
        ("é", "é"),
        ("e\u0301", "e:301:"),
    ],
)
def test_names_at_mlflow(name: str, at_mlflow: str) -> None:
    assert mlflow_name(name) == at_mlflow


def test_long_names_that_differ_in_the_middle_stay_apart() -> None:
    one, other = (f"val-core/{'x' * 150}{letter}{'x' * 150}/acc/mean@1" for letter in "ab")
    assert mlflow_name(one) != mlflow_name(other) and mlflow_name(one).endswith("/acc/mean_at_1")


def test_every_receiver_keeps_names_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sources = [
        "数学",
        "语文",
        "a b",
        "a_b",
        "a/b",
        "a:b",
        "[red]x",
        "$1 $2",
        "",
        "mean@1",
        "mean_at_1",
        "2024",
        "x" * 300,
    ]
    metrics = {f"val-core/{source}/acc/mean@1": float(number) for number, source in enumerate(sources)}
    settings = {"reward.source_scale": dict.fromkeys(sources, 1.0)}
    tracker = _tracker(tmp_path, ["console", "mlflow", "tensorboard"], settings)
    tracker.start()
    tracker.log(1, metrics)
    assert tracker.finish("finished") == []
    (record,) = read_history(tracker.metrics_path)
    assert {name: record[name] for name in metrics} == metrics
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = client.get_run((tmp_path / "run" / "mlflow_run_id").read_text().strip())
    assert {name: run.data.metrics[mlflow_name(name)] for name in metrics} == metrics
    assert len(run.data.metrics) == len(sources) == len(run.data.params)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(metrics)
    out = capsys.readouterr().out
    assert all(f"validation {source}" in out for source in sources) and tracker.plot_path.exists()
