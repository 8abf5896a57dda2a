"""The driver and its whole Ray are killed by SIGKILL; the same command continues as if nothing had happened.

Three processes: the run that is killed, the same command again, and the same run under another name, undisturbed. All
that a checkpoint must hold is in play: a critic, both optimisers and their schedules, an adaptive KL coefficient, the
prompt source in its second epoch.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.storage import checkpoints
from pipeline.track.history import read_history
from pipeline.track.trajectories import read_trajectories
from tests.chaos.checks import comparable, differing
from tests.chaos.processes import kill_tree
from tests.runs import BATCH, SAMPLES, TWO, folder_of, tiny_settings

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

ITERATIONS, KILLED_AFTER = 8, 3
RUN_S = 400.0
SETTINGS = (
    *("algorithm=ppo", "critic.optim.lr=1e-3", "actor.optim.lr_scheduler_type=linear"),
    *("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_ctrl.target_kl=0.01"),
    *("algorithm.kl_ctrl.horizon=64", "algorithm.max_staleness=0", "trainer.logger=[console]"),
    *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=1"),
    f"trainer.total_training_steps={ITERATIONS}",
)
COLUMNS = ("uid", "sample", "epoch", "offset", "policy_version", "prompt_ids", "response_ids", "score")


@dataclass(frozen=True)
class Runs:
    """Folders of the two runs, what the first had when it was killed, and what it printed afterwards."""

    killed: Path
    undisturbed: Path
    before: list[dict[str, Any]]
    saved: int
    printed: str


def start(settings: list[str], name: str, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "jobs.train", *settings, *TWO, *SETTINGS, f"trainer.experiment_name={name}"]
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    try:
        assert process.wait(RUN_S) == 0, log.read_text()
    finally:
        kill_tree(process.pid)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, prompt_files: Any) -> Runs:
    folder = tmp_path_factory.mktemp("resume")
    settings = tiny_settings(folder, tiny_model, prompt_files)
    killed, undisturbed = folder_of(settings, "killed"), folder_of(settings, "undisturbed")
    log, deadline = folder / "killed.log", time.monotonic() + RUN_S

    process = start(settings, "killed", log)
    try:
        while len(read_history(killed / "metrics.jsonl")) < KILLED_AFTER:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
    finally:
        kill_tree(process.pid)
    process.wait(10)
    before = read_history(killed / "metrics.jsonl")
    saved = checkpoints.newest(str(killed))
    assert saved is not None

    again = folder / "again.log"
    finish(start(settings, "killed", again), again)
    finish(start(settings, "undisturbed", folder / "undisturbed.log"), folder / "undisturbed.log")
    return Runs(killed, undisturbed, before, saved.iteration, again.read_text())


def test_the_run_was_killed_in_the_midst(runs: Runs) -> None:
    assert KILLED_AFTER <= runs.before[-1]["iteration"] < ITERATIONS
    assert 1 <= runs.saved < ITERATIONS
    # Both epochs of the prompts are used, and the second one is shuffled differently.
    epochs = [set(read_trajectories(str(runs.killed), k)["epoch"].to_pylist()) for k in (1, ITERATIONS)]
    assert epochs == [{0}, {1}]


def test_it_goes_on_from_the_checkpoint(runs: Runs) -> None:
    after = read_history(runs.killed / "metrics.jsonl")
    assert [record["iteration"] for record in after] == list(range(1, ITERATIONS + 1))
    kept = [record for record in runs.before if record["iteration"] <= runs.saved]
    assert after[: len(kept)] == kept and len(kept) == runs.saved
    assert f"iteration {runs.saved + 1}/{ITERATIONS}" in runs.printed
    assert f"iteration {runs.saved}/{ITERATIONS}" not in runs.printed
    assert os.path.isfile(runs.killed / "model" / "config.json")


@pytest.mark.parametrize("iteration", range(1, ITERATIONS + 1))
def test_its_rows_are_those_of_an_undisturbed_run(runs: Runs, iteration: int) -> None:
    ours, theirs = (
        read_trajectories(str(folder), iteration, columns=COLUMNS) for folder in (runs.killed, runs.undisturbed)
    )
    assert len(ours) == BATCH * SAMPLES
    for name in COLUMNS:
        assert ours[name].equals(theirs[name]), name


@pytest.mark.parametrize("iteration", range(1, ITERATIONS + 1))
def test_its_metrics_are_those_of_an_undisturbed_run(runs: Runs, iteration: int) -> None:
    ours, theirs = (
        comparable(read_history(folder / "metrics.jsonl")[iteration - 1]) for folder in (runs.killed, runs.undisturbed)
    )
    assert len(ours) > 40 and "actor/reward_kl_penalty_coeff" in ours and "critic/lr" in ours
    assert differing(ours, theirs) == [], {name: (ours.get(name), theirs.get(name)) for name in differing(ours, theirs)}
