"""One process of a real run is killed, and the run ends as if it had not been.

Runs of four iterations with strictly on-policy sampling and a checkpoint after each, in this process: one that is left
alone, and one for each kind of process. Its victim is killed with SIGKILL once a given iteration has been recorded.
"""

import contextlib
import json
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.util.placement_group import placement_group_table

from pipeline.track.trajectories import read_trajectories
from tests.runs import BATCH, CHUNKS, SAMPLES, TWO, Run, Start, folder_of, starter, tiny_settings
from tests.test_end_to_end import comparable

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

ITERATIONS = 4
VICTIMS = {
    "store": r"^ray::PolicyStore",
    "train worker": r"^ray::(\w*TrainWorker)",
    "controller": r"^ray::TrainController",
    "engine": r"MapBatches\(Rollout\)",
    "prompts": r"MapBatches\(Prompts\)",
    "reward task": r"pipeline\.reward\.program import",
}
"""How the processes are called; the last is called so by what it has started."""
RESTARTED = ("store", "train worker", "controller")
"""Victims whose death restarts the train workers."""
LEAST = (
    *(f"trainer.total_training_steps={ITERATIONS}", "trainer.save_freq=1", "trainer.test_freq=2"),
    *("trainer.val_before_train=false", "trainer.logger=[console,mlflow]"),
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, prompt_files: Any) -> list[str]:
    return tiny_settings(tmp_path_factory.mktemp("faults"), tiny_model, prompt_files)


@pytest.fixture(scope="module")
def start(settings: list[str], ray_session: None) -> Start:
    return starter(settings)


@pytest.fixture(scope="module")
def whole(start: Start) -> Run:
    return start("whole", *TWO, *LEAST)


def processes(pattern: str) -> list[psutil.Process]:
    """This session's processes of that name; never those of another Ray on the machine."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if re.search(pattern, " ".join(process.cmdline())):
                found.append(process)
    return found


def held() -> list[str]:
    """Placement groups that are left."""
    return [group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED"]


class Killer(threading.Thread):
    """Kills one process once iteration `after` is recorded."""

    def __init__(self, pattern: str, metrics: Path, after: int):
        super().__init__(daemon=True)
        self.pattern, self.metrics, self.after = pattern, metrics, after
        self.killed: psutil.Process | None = None

    def run(self) -> None:
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline and not self._due():
            time.sleep(0.02)
        while time.monotonic() < deadline and self.killed is None:
            for process in processes(self.pattern)[:1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim = process.parent() if self.pattern == VICTIMS["reward task"] else process
                    if victim is not None:
                        victim.send_signal(signal.SIGKILL)
                        self.killed = victim
            time.sleep(0.02)

    def _due(self) -> bool:
        with contextlib.suppress(OSError):
            lines = self.metrics.read_text().splitlines()
            return any(json.loads(line)["iteration"] >= self.after for line in lines if line.endswith("}"))
        return False


@pytest.fixture
def kill(settings: list[str]) -> Iterator[Callable[[str, str, int], Killer]]:
    made: list[Killer] = []

    def start(victim: str, name: str, after: int) -> Killer:
        killer = Killer(VICTIMS[victim], folder_of(settings, name) / "metrics.jsonl", after)
        killer.start()
        made.append(killer)
        return killer

    yield start
    for killer in made:
        killer.join(1)


def complete(run: Run) -> None:
    """Every prompt of every iteration has its samples, once, and each chunk its file."""
    assert sorted(run.records) == list(range(1, ITERATIONS + 1))
    offsets: list[int] = []
    for iteration in range(1, ITERATIONS + 1):
        rows = read_trajectories(str(run.folder), iteration)
        assert len(rows) == BATCH * SAMPLES
        assert set(rows["policy_version"].to_pylist()) == {iteration - 1}
        assert set(Counter(rows["uid"].to_pylist()).values()) == {SAMPLES}
        offsets += rows["offset"].to_pylist()[::SAMPLES]
    assert offsets == list(range(BATCH * ITERATIONS)), "no prompt is lost and none trained twice"
    assert len(list((run.folder / "trajectories").glob("*/*.parquet"))) == CHUNKS * ITERATIONS


def same(run: Run, other: Run) -> None:
    for iteration in range(1, ITERATIONS + 1):
        ours, theirs = comparable(run.records[iteration]), comparable(other.records[iteration])
        # An engine that was started again loads its version once more.
        for record in (ours, theirs):
            record.pop("rollout/engines_loaded", None)
        assert len(ours) > 25
        assert ours == {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in theirs.items()}


def test_a_run_that_is_left_alone(whole: Run) -> None:
    complete(whole)
    assert "restarted" not in whole.printed
    assert all(any(name.startswith("val-") for name in whole.records[i]) for i in (2, 4))


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_process_changes_nothing(
    victim: str, whole: Run, start: Start, kill: Callable[[str, str, int], Killer]
) -> None:
    name = f"killed-{victim.replace(' ', '-')}"
    killer = kill(victim, name, 2)
    run = start(name, *TWO, *LEAST)
    assert killer.killed is not None, "nobody was killed"
    complete(run)
    same(run, whole)
    assert not held(), "CPUs of the dead are held"
    told = " ".join(run.printed.split())
    if victim in RESTARTED:
        # The first checkpoints may not have been whole yet.
        found = re.search(r"restarted the train workers from iteration ([0-3]) because (.{10})", told)
        assert found, told
    else:
        assert "restarted the train workers" not in told


def test_a_run_goes_on_with_another_number_of_train_workers(whole: Run, start: Start) -> None:
    """Optimiser state and weights are resharded: the losses are those of the run that never ended."""
    least = [setting for setting in LEAST if "total_training_steps" not in setting]
    first = start("fewer", *TWO, *least, "trainer.total_training_steps=2")
    assert sorted(first.records) == [1, 2]
    run = start("fewer", *LEAST, "trainer.num_workers=1")
    complete(run)
    for iteration in range(1, ITERATIONS + 1):
        for metric in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"):
            ours, theirs = run.records[iteration][metric], whole.records[iteration][metric]
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4), (iteration, metric)
