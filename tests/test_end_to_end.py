"""Whole runs with everything real: parquet, vLLM, Ray Data, Ray Train with FSDP2, MLflow; only the policy is tiny.

The runs are started once for the module, in this order: two iterations, the same again in another folder, a third
iteration of the first, and one iteration with one train worker. A last run in a process of its own takes Ctrl-C.
"""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config import Config, load_config, load_yaml
from pipeline.track.trajectories import read_trajectories
from tests.runs import BATCH, CHUNKS, SAMPLES, TWO, Run, Start, folder_of, score, starter, tiny_settings

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

TIMED = ("timing_s/", "timing_per_token_ms/", "perf/", "rollout/generate_s", "rollout/load_s")
"""Prefixes of metrics that say how long something took."""
ROUNDING = ("training/rollout_", "actor/ppo_kl", "actor/pg_clipfrac")
"""Prefixes of metrics that are differences of nearly equal numbers."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, prompt_files: Any) -> list[str]:
    return tiny_settings(tmp_path_factory.mktemp("end_to_end"), tiny_model, prompt_files)


@pytest.fixture(scope="module")
def start(settings: list[str], ray_session: None) -> Start:
    return starter(settings)


@pytest.fixture(scope="module")
def first(start: Start) -> Run:
    return start("first", *TWO, "trainer.total_training_steps=2")


@pytest.fixture(scope="module")
def twin(start: Start, first: Run) -> Run:
    return start("twin", *TWO, "trainer.total_training_steps=2")


@pytest.fixture(scope="module")
def alone(start: Start, first: Run) -> Run:
    return start("alone", "trainer.num_workers=1", "trainer.total_training_steps=1", "trainer.test_freq=-1")


@pytest.fixture(scope="module")
def final_model(first: Run) -> Any:
    """The first run's model, before that run goes on."""
    return AutoModelForCausalLM.from_pretrained(first.folder / "model")


@pytest.fixture(scope="module")
def mlflow_run(first: Run) -> dict[str, Any]:
    """What MLflow had of the first run, before that run goes on."""
    return from_mlflow(first)


@pytest.fixture(scope="module")
def continued(start: Start, first: Run, final_model: Any, mlflow_run: Any) -> Run:
    # As a broken-off try of iteration 3 would have left it: chunks are numbered anew in a continued run.
    stale = first.folder / "trajectories" / "iteration=000003" / "chunk-000099.parquet"
    stale.parent.mkdir(exist_ok=True)
    shutil.copyfile(next(first.folder.glob("trajectories/iteration=000002/*.parquet")), stale)
    return start("first", *TWO, "trainer.total_training_steps=3")


def from_mlflow(run: Run) -> dict[str, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run.folder.parent / 'mlflow.db'}")
    found = client.get_run(run.mlflow_run_id)
    history = client.get_metric_history(run.mlflow_run_id, "critic/score/mean")
    return {
        "status": found.info.status,
        "inputs": sorted(each.dataset.name for each in found.inputs.dataset_inputs),
        "params": found.data.params,
        "metrics": found.data.metrics,
        "score": {point.step: point.value for point in history},
        "artifacts": [item.path for item in client.list_artifacts(run.mlflow_run_id)],
    }


def test_metrics_of_every_iteration(first: Run, prompt_files: Any) -> None:
    assert sorted(first.records) == [0, 1, 2]
    for iteration in (1, 2):
        record = first.records[iteration]
        assert record["training/rollout_log_probs_diff_max"] < 1e-4
        assert record["training/policy_version"] == iteration - 1
        assert record["training/staleness/max"] == record["training/staleness/min"] == 0
        assert record["rollout/engines_loaded"] == 1
        assert record["reward/error_rate"] == 0
        assert record["actor/grad_norm"] > 1e-3 and record["actor/skipped_steps"] == 0
        assert record["actor/lr"] == 1e-2
        for name in ("step", "gen", "update_actor", "load_weights", "reward", "publish"):
            assert record[f"timing_s/{name}"] > 0, name
        # The first weights waited for the engine to start, which is no figure of an update.
        assert ("timing_s/update_weights" in record) == (iteration > 1)
        assert record.get("timing_s/update_weights", 1e9) >= record["timing_s/load_weights"]
        assert record["perf/throughput"] > 0
    for iteration in (0, 1, 2):
        assert 0 < first.records[iteration]["val-core/countdown/reward/mean@1"] < 1
    assert first.records[1]["actor/pg_loss"] != first.records[2]["actor/pg_loss"]


def test_trained_rows_carry_their_version(first: Run) -> None:
    offsets: list[int] = []
    for iteration in (1, 2):
        rows = read_trajectories(str(first.folder), iteration)
        assert len(rows) == BATCH * SAMPLES
        assert set(rows["policy_version"].to_pylist()) == {iteration - 1}
        assert Counter(rows["uid"].to_pylist()) == dict.fromkeys(rows["uid"].to_pylist(), SAMPLES)
        offsets += rows["offset"].to_pylist()[::SAMPLES]
        record = first.records[iteration]
        assert record["critic/score/mean"] == pytest.approx(sum(rows["score"].to_pylist()) / len(rows), abs=1e-6)
        tokens = [len(ids) for ids in rows["response_ids"].to_pylist()]
        assert record["response_length/mean"] == pytest.approx(sum(tokens) / len(tokens))
    assert offsets == list(range(2 * BATCH))


def test_one_engine_serves_the_whole_run(first: Run) -> None:
    training = [read_trajectories(str(first.folder), iteration) for iteration in (1, 2)]
    validation = [read_trajectories(str(first.folder), version, "val") for version in (0, 1, 2)]
    assert len({name for rows in (*training, *validation) for name in rows["engine"].to_pylist()}) == 1


def test_model_folder_holds_the_last_published_weights(first: Run, final_model: Any, tiny_model: Path) -> None:
    """The last validation was generated with the version that was published last."""
    rows = read_trajectories(str(first.folder), 2, "val")
    assert len(rows) == 7 and set(rows["policy_version"].to_pylist()) == {2}
    assert score(final_model, rows) < 1e-4
    assert score(AutoModelForCausalLM.from_pretrained(tiny_model), rows) > 1e-2
    assert final_model.config.tie_word_embeddings
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (first.folder / "model", tiny_model))
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template


def test_what_a_run_leaves(first: Run, settings: list[str]) -> None:
    stored = load_yaml(first.folder / "config.yaml", Config)
    name = "trainer.experiment_name=first"
    assert stored == load_config([*settings, name, *TWO, "trainer.total_training_steps=2"])
    with Image.open(first.folder / "learning_curve.png") as image:
        assert image.width > 300
    assert [path.name for path in (first.folder / "checkpoints").glob("iteration_*")] == ["iteration_000002"]
    for part in ("first: finished", "(iteration 0 → 2)", "run folder", "model", "to continue"):
        assert part in first.printed, first.printed


def test_mlflow_has_the_run(first: Run, mlflow_run: dict[str, Any]) -> None:
    assert mlflow_run["status"] == "FINISHED"
    assert mlflow_run["params"]["actor.optim.lr"] == "0.01"
    assert mlflow_run["score"] == {i: pytest.approx(first.records[i]["critic/score/mean"]) for i in (1, 2)}
    assert mlflow_run["metrics"]["val-core/countdown/reward/mean_at_1"] == pytest.approx(
        first.records[2]["val-core/countdown/reward/mean@1"]
    )
    assert {"learning_curve.png", "samples"} <= set(mlflow_run["artifacts"])


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    skipped = (*TIMED, *ROUNDING, "time", "elapsed_s")
    return {name: value for name, value in record.items() if not name.startswith(skipped)}


@pytest.mark.long
def test_same_seed_gives_the_same_metrics(first: Run, twin: Run) -> None:
    for iteration in (0, 1, 2):
        ours, theirs = comparable(first.records[iteration]), comparable(twin.records[iteration])
        assert len(ours) > (2 if iteration == 0 else 25)
        assert theirs == {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in ours.items()}
        ours_rows, theirs_rows = (
            read_trajectories(str(run.folder), iteration, "train" if iteration else "val") for run in (first, twin)
        )
        assert ours_rows["response_ids"].equals(theirs_rows["response_ids"])


@pytest.mark.long
def test_workers_change_neither_loss_nor_gradient(first: Run, alone: Run) -> None:
    two, one = first.records[1], alone.records[1]
    for name in ("actor/pg_loss", "actor/loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"):
        assert math.isfinite(two[name]) and one[name] == pytest.approx(two[name], rel=1e-4), name
    assert abs(two["actor/pg_loss"]) > 1e-3


def test_the_same_command_continues(first: Run, continued: Run, prompt_files: Any) -> None:
    assert continued.folder == first.folder
    assert {i: continued.records[i] for i in (0, 1, 2)} == first.records, "finished iterations stay as they were"
    assert sorted(continued.records) == [0, 1, 2, 3]
    record = continued.records[3]
    assert record["training/policy_version"] == 2
    assert record["training/rollout_log_probs_diff_max"] < 1e-4
    assert record["elapsed_s"] > first.records[2]["elapsed_s"]
    rows = read_trajectories(str(first.folder), 3)
    assert rows["offset"].to_pylist()[::SAMPLES] == list(range(2 * BATCH, 3 * BATCH))
    assert set(rows["epoch"].to_pylist()) == {0}
    seen = {uid for i in (1, 2) for uid in read_trajectories(str(first.folder), i)["uid"].to_pylist()}
    assert not seen & set(rows["uid"].to_pylist())


def test_continued_run_starts_from_the_checkpoint(continued: Run, final_model: Any) -> None:
    """The rows of iteration 3 come from version 2, which the folder `model` held when the first run ended."""
    assert score(final_model, read_trajectories(str(continued.folder), 3)) < 1e-4
    last = AutoModelForCausalLM.from_pretrained(continued.folder / "model")
    assert score(last, read_trajectories(str(continued.folder), 3, "val")) < 1e-4
    assert score(last, read_trajectories(str(continued.folder), 3)) > 1e-3


def test_continued_run_is_the_same_mlflow_run(first: Run, continued: Run) -> None:
    assert continued.mlflow_run_id == first.mlflow_run_id
    found = from_mlflow(continued)
    assert sorted(found["score"]) == [1, 2, 3] and found["status"] == "FINISHED"
    assert found["inputs"] == ["train.parquet", "val.parquet"]


@pytest.fixture
def process(settings: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A long run on its own, started from a terminal of its own."""
    command = [sys.executable, "-m", "jobs.train", *settings, "trainer.experiment_name=interrupted"]
    command += ["trainer.total_training_steps=1000", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    yield started
    if started.poll() is None:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def test_ctrl_c_ends_after_the_iteration_and_saves(
    process: subprocess.Popen[str], settings: list[str], start: Start, ray_session: None
) -> None:
    folder, deadline = folder_of(settings, "interrupted"), time.monotonic() + 240
    while not (folder / "metrics.jsonl").is_file() or "\n" not in (folder / "metrics.jsonl").read_text():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no iteration within the deadline"
        time.sleep(0.2)
    # A terminal sends the signal to all processes of the command, Ray's own included.
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=120)

    assert process.returncode == 130, printed
    assert "interrupted: interrupted" in printed and "to continue" in printed and "Traceback" not in printed, printed
    run = Run.of(folder, printed)
    last = max(run.records)
    assert sorted(run.records) == list(range(1, last + 1)) and last < 1000
    assert [path.name for path in (folder / "checkpoints").glob("iteration_*")] == [f"iteration_{last:06d}"]
    assert score(AutoModelForCausalLM.from_pretrained(folder / "model"), read_trajectories(str(folder), last)) > 1e-3

    # Chunks that had been generated ahead of the interruption are not mixed with those of the continued run.
    more = ("trainer.test_freq=-1", "trainer.val_before_train=false", f"trainer.total_training_steps={last + 1}")
    again = start("interrupted", *more)
    assert sorted(again.records) == list(range(1, last + 2))
    assert len(read_trajectories(str(folder), last + 1)) == BATCH * SAMPLES
    assert len(list((folder / "trajectories").glob("*/*.parquet"))) == CHUNKS * (last + 1)
    assert all(
        len(pq.read_table(path)) == BATCH * SAMPLES // CHUNKS for path in folder.glob("trajectories/*/*.parquet")
    )
