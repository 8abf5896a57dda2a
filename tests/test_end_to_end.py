"""Whole runs with everything real: parquet, vLLM, Ray Data, Ray Train with FSDP2, MLflow; only the policy is tiny.

Most tests read the one run of the session (`tests/runs.py`), which SIGTERM ended and the same command continued;
`test_end_to_end_ppo.py` looks at its critic and its KL. The long tests compare runs of GRPO with each other.
"""

import math
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config import Config, load_config, load_yaml
from pipeline.track.trajectories import read_trajectories
from tests.runs import BATCH, CHUNKS, SAMPLES, TWO, Run, Start, Training, score, starter, tiny_settings

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

TIMED = ("timing_s/", "timing_per_token_ms/", "perf/", "rollout/generate_s", "rollout/load_s")
"""Prefixes of metrics that say how long something took."""
ROUNDING = ("training/rollout_", "actor/ppo_kl", "actor/pg_clipfrac")
"""Prefixes of metrics that are differences of nearly equal numbers."""


def test_a_signal_to_the_group_ends_after_the_iteration_and_saves(training: Training) -> None:
    """TERM to the command's whole group, which has a `tee` that dies before the run prints its last lines."""
    printed, last = training.first.printed, training.last
    assert training.exit_code == 128 + signal.SIGTERM, printed
    assert "trained: interrupted" in printed and "to continue" in printed and "Traceback" not in printed, printed
    assert sorted(training.first.records) == list(range(last + 1)) and last < 1000
    checkpoints = (training.before / "checkpoints").glob("iteration_*")
    assert [path.name for path in checkpoints] == [f"iteration_{last:06d}"]
    assert (training.before / "model" / "config.json").is_file()


def test_the_same_command_continues(training: Training) -> None:
    first, continued, last = training.first, training.continued, training.last
    assert continued.folder == first.folder and continued.mlflow_run_id == first.mlflow_run_id
    for iteration, record in first.records.items():
        # The last one is validated once more: the checkpoint was saved before its validation came.
        repeated = {"time", "elapsed_s", "timing_s/testing"} if iteration == last else set()
        kept = {name: value for name, value in record.items() if name not in repeated}
        assert kept.items() <= continued.records[iteration].items()
    assert sorted(continued.records) == list(range(last + 2))
    assert continued.records[last + 1]["elapsed_s"] > first.records[last]["elapsed_s"]
    # Neither chunks that were generated ahead of the interruption nor those of a broken-off try are mixed in.
    chunks = list(continued.folder.glob("trajectories/*/*.parquet"))
    assert len(chunks) == CHUNKS * (last + 1)
    assert {len(pq.read_table(path)) for path in chunks} == {BATCH * SAMPLES // CHUNKS}


def test_metrics_of_every_iteration(training: Training) -> None:
    records = training.continued.records
    for iteration, record in records.items():
        assert 0 < record["val-core/countdown/reward/mean@1"] < 1
        if iteration == 0:
            continue
        assert record["training/policy_version"] == iteration - 1
        assert record["training/staleness/max"] == record["training/staleness/min"] == 0
        assert record["rollout/engines_loaded"] == 1
        assert record["reward/error_rate"] == 0
        for name in ("step", "gen", "load_weights", "reward", "publish"):
            assert record[f"timing_s/{name}"] > 0, name
        # The first weights of an attempt wait for the engine to start, which is no figure of an update.
        assert ("timing_s/update_weights" in record) == (iteration not in (1, training.last + 1))
        assert record.get("timing_s/update_weights", 1e9) >= record["timing_s/load_weights"]
        assert record["perf/throughput"] > 0
        if iteration > 1:  # the first one trains the critic alone
            assert record["training/rollout_log_probs_diff_max"] < 1e-4
            assert record["actor/grad_norm"] > 1e-3 and record["actor/skipped_steps"] == 0
            assert record["actor/lr"] == 1e-2 and record["timing_s/update_actor"] > 0
    losses = [record["actor/pg_loss"] for record in records.values() if "actor/pg_loss" in record]
    assert len(set(losses)) == training.last


def test_trained_rows_carry_their_version_and_follow_the_prompts(training: Training, prompt_files: Any) -> None:
    prompts: list[tuple[int, int]] = []
    for iteration in range(1, training.last + 2):
        rows = read_trajectories(str(training.continued.folder), iteration)
        assert len(rows) == BATCH * SAMPLES
        assert set(rows["policy_version"].to_pylist()) == {iteration - 1}
        assert Counter(rows["uid"].to_pylist()) == dict.fromkeys(rows["uid"].to_pylist(), SAMPLES)
        places = zip(rows["epoch"].to_pylist(), rows["offset"].to_pylist(), strict=True)
        prompts += list(places)[::SAMPLES]
        record = training.continued.records[iteration]
        assert record["critic/score/mean"] == pytest.approx(sum(rows["score"].to_pylist()) / len(rows), abs=1e-6)
        tokens = [len(ids) for ids in rows["response_ids"].to_pylist()]
        assert record["response_length/mean"] == pytest.approx(sum(tokens) / len(tokens))
    # The continued run begins behind the last prompt that was used.
    assert prompts == [divmod(number, prompt_files.train_rows) for number in range(BATCH * (training.last + 1))]


def test_one_engine_serves_a_whole_attempt(training: Training) -> None:
    folder = str(training.continued.folder)
    rows = [read_trajectories(folder, iteration) for iteration in range(1, training.last + 1)]
    rows += [read_trajectories(folder, version, "val") for version in range(training.last)]
    assert len({name for table in rows for name in table["engine"].to_pylist()}) == 1


def test_the_model_folder_holds_the_last_published_weights(training: Training, tiny_model: Path) -> None:
    """The last validation was generated with the version that was published last, as is the first continued chunk."""
    folder, last = training.continued.folder, training.last
    before, after = (
        AutoModelForCausalLM.from_pretrained(path) for path in (training.before / "model", folder / "model")
    )
    for model, version in ((before, last), (after, last + 1)):
        rows = read_trajectories(str(folder), version, "val")
        assert len(rows) == 7 and set(rows["policy_version"].to_pylist()) == {version}
        assert score(model, rows) < 1e-4
        assert score(AutoModelForCausalLM.from_pretrained(tiny_model), rows) > 1e-2
    trained = read_trajectories(str(folder), last + 1)
    assert score(before, trained) < 1e-4 and score(after, trained) > 1e-3
    assert after.config.tie_word_embeddings
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (folder / "model", tiny_model))
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template


def test_what_a_run_leaves(training: Training) -> None:
    run, last = training.continued, training.last
    stored = load_yaml(run.folder / "config.yaml", Config)
    more = ["trainer.experiment_name=trained", f"trainer.total_training_steps={last + 1}"]
    assert stored == load_config([*training.settings, *more])
    with Image.open(run.folder / "learning_curve.png") as image:
        assert image.width > 300
    for part in ("trained: finished", f"(iteration 0 → {last + 1})", "run folder", "model", "to continue"):
        assert part in run.printed, run.printed


def test_mlflow_has_the_run(training: Training) -> None:
    from mlflow.tracking import MlflowClient

    run, last = training.continued, training.last
    client = MlflowClient(f"sqlite:///{run.folder.parent / 'mlflow.db'}")
    found = client.get_run(run.mlflow_run_id)
    assert found.info.status == "FINISHED" and found.data.params["actor.optim.lr"] == "0.01"
    history = client.get_metric_history(run.mlflow_run_id, "critic/score/mean")
    scores = {iteration: run.records[iteration]["critic/score/mean"] for iteration in range(1, last + 2)}
    assert {point.step: point.value for point in history} == pytest.approx(scores)
    validated = run.records[last + 1]["val-core/countdown/reward/mean@1"]
    assert found.data.metrics["val-core/countdown/reward/mean_at_1"] == pytest.approx(validated)
    assert {"learning_curve.png", "samples"} <= {item.path for item in client.list_artifacts(run.mlflow_run_id)}
    traces = client.search_traces(locations=[found.info.experiment_id], run_id=run.mlflow_run_id)
    tags = [(trace.info.tags["split"], int(trace.info.tags["iteration"])) for trace in traces]
    assert {tag: tags.count(tag) for tag in tags if tag[0] == "train"} == {("train", k): 2 for k in range(1, last + 2)}
    assert {trace.info.tags["uid"] for trace in traces if trace.info.tags["split"] == "val"} == {
        f"val-{number}" for number in range(2)
    }
    assert sorted(each.dataset.name for each in found.inputs.dataset_inputs) == ["train.parquet", "val.parquet"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, prompt_files: Any, ray_session: None) -> Start:
    return starter(tiny_settings(tmp_path_factory.mktemp("end_to_end"), tiny_model, prompt_files))


@pytest.fixture(scope="module")
def grpo(start: Start) -> Run:
    return start("grpo", *TWO, "trainer.total_training_steps=2")


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    skipped = (*TIMED, *ROUNDING, "time", "elapsed_s")
    return {name: value for name, value in record.items() if not name.startswith(skipped)}


@pytest.mark.long
def test_same_seed_gives_the_same_metrics(start: Start, grpo: Run) -> None:
    twin = start("twin", *TWO, "trainer.total_training_steps=2")
    for iteration in (0, 1, 2):
        ours, theirs = comparable(grpo.records[iteration]), comparable(twin.records[iteration])
        assert len(ours) > (2 if iteration == 0 else 25)
        assert theirs == {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in ours.items()}
        split = "train" if iteration else "val"
        ours_rows, theirs_rows = (read_trajectories(str(run.folder), iteration, split) for run in (grpo, twin))
        assert ours_rows["response_ids"].equals(theirs_rows["response_ids"])


@pytest.mark.long
def test_workers_change_neither_loss_nor_gradient(start: Start, grpo: Run) -> None:
    alone = start("alone", "trainer.num_workers=1", "trainer.total_training_steps=1", "trainer.test_freq=-1")
    two, one = grpo.records[1], alone.records[1]
    for name in ("actor/pg_loss", "actor/loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"):
        assert math.isfinite(two[name]) and one[name] == pytest.approx(two[name], rel=1e-4), name
    assert abs(two["actor/pg_loss"]) > 1e-3
