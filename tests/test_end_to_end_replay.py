"""A whole run, and what replaying it gives: everything real but the engine, which a replay does without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.config import Config, load_yaml
from pipeline.track.trajectories import read_trajectories
from tests.runs import BATCH, SAMPLES, TWO, Run, replayed, starter, tiny_settings

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]

LENGTHS = (
    "\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n    return -float(len(solution_str))\n"
)
OF_THE_ENGINE = ("timing_", "perf/", "rollout/", "prompts/", "time", "elapsed_s")
"""Beginnings of metrics that say how rows came about, or how long something took."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, prompt_files: Any, ray_session: None) -> Run:
    settings = tiny_settings(tmp_path_factory.mktemp("replay"), tiny_model, prompt_files)
    settings = [setting for setting in settings if not setting.startswith(("data.val_files", "trainer.test_freq"))]
    return starter(settings)("recorded", *TWO, "trainer.total_training_steps=2")


@pytest.fixture(scope="module")
def again(recorded: Run) -> Run:
    return replayed(recorded.folder, "again", "trainer.max_log_prob_gap=1e-4")


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "model" / "model.safetensors")


def assert_same_weights(run: Run, other: Run) -> None:
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


def test_a_replay_without_changes_is_the_recorded_run_once_more(recorded: Run, again: Run) -> None:
    assert sorted(again.records) == sorted(recorded.records) == [1, 2]
    for iteration in (1, 2):
        was, now = recorded.records[iteration], again.records[iteration]
        names = {name for name in was if not name.startswith(OF_THE_ENGINE)}
        assert names == {name for name in now if not name.startswith(OF_THE_ENGINE)}
        assert {"actor/pg_loss", "actor/grad_norm", "critic/score/mean", "training/rollout_log_probs_diff_max"} <= names
        assert {name: now[name] for name in names} == {name: was[name] for name in names}
    assert abs(recorded.records[1]["actor/pg_loss"]) > 1e-3
    assert_same_weights(recorded, again)


def test_a_replay_starts_no_engine(recorded: Run, again: Run) -> None:
    for record in again.records.values():
        assert not [name for name in record if name.startswith("rollout/")]
    assert [record["prompts/recorded_iteration"] for record in again.records.values()] == [1, 2]
    assert "note: a replay starts no engine" in again.printed and "starting the train workers" in again.printed
    assert f"python -m jobs.replay {recorded.folder}" in again.printed, "the command that continues it"
    for iteration in (1, 2):
        ours, theirs = (read_trajectories(str(run.folder), iteration) for run in (again, recorded))
        for name in ("uid", "response_ids", "rollout_log_probs", "engine", "score", "advantages"):
            assert ours[name].equals(theirs[name]), name


def test_an_interrupted_replay_goes_on_where_it_was(recorded: Run, again: Run) -> None:
    replayed(recorded.folder, "halves", "trainer.total_training_steps=1")
    both = replayed(recorded.folder, "halves", "trainer.total_training_steps=2")
    assert sorted(both.records) == [1, 2]
    assert_same_weights(again, both)


def test_another_algorithm_and_another_reward_on_the_same_responses(recorded: Run, again: Run, tmp_path: Path) -> None:
    (tmp_path / "lengths.py").write_text(LENGTHS)
    other = replayed(
        recorded.folder,
        "other",
        "algorithm=[rloo,tis]",
        f"reward.custom_reward_function.path={tmp_path / 'lengths.py'}",
        f"data.train_batch_size={2 * BATCH}",
        "trainer.total_epochs=2",
    )
    assert load_yaml(other.folder / "config.yaml", Config).algorithm.adv_estimator == "rloo"
    assert sorted(other.records) == [1, 2]
    first = read_trajectories(str(other.folder), 1)
    theirs = [read_trajectories(str(recorded.folder), iteration) for iteration in (1, 2)]
    assert len(first) == 2 * BATCH * SAMPLES
    assert first["response_ids"].to_pylist() == [ids for rows in theirs for ids in rows["response_ids"].to_pylist()]
    assert first["score"].to_pylist() == [-float(len(text)) for text in first["response"].to_pylist()]
    # By then the policy is another one than either that was recorded, which is seen, weighed, and no error.
    second = other.records[2]
    assert second["training/epoch"] == 1 and second["training/policy_version"] == 1
    assert second["training/rollout_log_probs_diff_max"] > 1e-2
    assert second["rollout_corr/rollout_is_mean"] != 1 and second["actor/grad_norm"] > 0
    assert any(not torch.equal(weight, weights(again)[name]) for name, weight in weights(other).items())
