"""Whole supervised runs on the local Ray: what they leave, and how they continue after Ctrl-C and SIGKILL."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from jobs import sft as job
from pipeline.config import load
from pipeline.config.supervised import SFTConfig
from pipeline.storage.checkpoints import newest
from pipeline.store.events import Event, IterationTrained
from pipeline.supervised.driver import Training
from pipeline.track.history import read_history
from tests.chaos.processes import kill_tree
from tests.supervised.test_sft import write

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STEPS = 6
SAME = ("loss", "grad_norm", "lr", "val_loss", "perf/total_num_tokens")
"""Metrics that do not depend on time."""


def arguments(folder: Path, model: Path, out: str, *more: str) -> list[str]:
    files = folder / "train.parquet"
    if not files.exists():
        # Row groups of 10, batches of 8: a run that continues begins in the midst of a row group, in the second epoch.
        write(files, 22, row_group_size=10)
    settings = [f"out={folder / out}", f"model.path={model}", f"data.train_files={files}", "data.train_batch_size=8"]
    settings += ["optim.lr=3e-3", f"trainer.total_training_steps={STEPS}", f"data.val_files={files}"]
    return [*settings, "data.val_max_samples=5", "trainer.test_freq=2", "trainer.logger=[console]", *more]


def assert_same(one: Path, other: Path) -> None:
    """The two runs have the same metrics at each step, and the same model."""
    ours, theirs = (read_history(folder / "metrics.jsonl") for folder in (one, other))
    assert [record["iteration"] for record in ours] == list(range(1, STEPS + 1))
    for left, right in zip(ours, theirs, strict=True):
        assert {name: left.get(name) for name in SAME} == {name: right.get(name) for name in SAME}
    weights = [load_file(folder / "model.safetensors") for folder in (one, other)]
    assert all((weights[0][name] == tensor).all() for name, tensor in weights[1].items())


def test_a_run_that_ctrl_c_stopped_continues_as_if_it_had_not(
    tmp_path: Path,
    tiny_model: Path,
    ray_session: None,
    mlflow_database: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from mlflow.tracking import MlflowClient

    shutil.copy(mlflow_database, tmp_path / "mlflow.db")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    job.run(load(SFTConfig, arguments(tmp_path, tiny_model, "whole"), "sft"))
    assert len({path.stat().st_mode & 0o777 for path in whole.iterdir() if path.is_file()}) == 1
    # The model and the records of its run; nothing continues a finished run.
    records = {"config.yaml", "metrics.jsonl", "console.log", "learning_curve.png", "fingerprints.json"}
    assert records | {"config.json", "model.safetensors"} <= {path.name for path in whole.iterdir()}
    assert not (whole / "checkpoints").exists()
    assert (whole / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    lines = (whole / "console.log").read_text().splitlines()
    assert lines.count("whole: starting the workers") == 1
    steps = [line for line in lines if line.split("  ")[0].endswith(f"/{STEPS}")]
    assert [line.split("/")[0] for line in steps] == [str(step) for step in range(1, STEPS + 1)]
    assert all("  loss " in line and "  grad norm " in line and " tok/s  " in line for line in steps)
    assert ["  val " in line for line in steps] == [False, True] * 3 and "  lr " in steps[0]
    assert any("left" in line for line in steps) and all(len(line) <= 80 for line in steps)

    # Before each checkpoint the workers wait until the driver has recorded the step, so the stop comes in time.
    more = ("trainer.logger=[console,mlflow]", "trainer.save_freq=1")
    command = arguments(tmp_path, tiny_model, "stopped", *more)
    handle = Training._handle

    def stop(training: Training, event: Event) -> None:
        handle(training, event)
        if isinstance(event, IterationTrained) and event.iteration == 3:
            signal.raise_signal(signal.SIGINT)

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(Training, "_handle", stop)
        assert job.main(command) == 130
    said = capsys.readouterr()
    assert "stopping after this step" in said.out and "to continue" in said.out
    assert said.err == "python -m jobs.sft: interrupted; the same command continues\n"
    saved = newest(str(stopped))
    assert saved and 3 <= saved.iteration < STEPS and not (stopped / "config.json").exists()
    assert len(read_history(stopped / "metrics.jsonl")) == saved.iteration

    assert job.main(command) == 0
    printed = capsys.readouterr().out
    assert f"sft: note: continuing after step {saved.iteration}, from {saved.place}" in printed
    assert_same(stopped, whole)
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = client.get_run((stopped / "mlflow_run_id").read_text().strip())
    assert run.info.run_name == "stopped" and run.info.status == "FINISHED"
    # The step whose event Ctrl-C interrupted is recorded twice.
    points = client.get_metric_history(run.info.run_id, "loss")
    assert sorted({point.step for point in points}) == list(range(1, STEPS + 1))

    # A finished run is left as it is.
    assert job.main(command) == 2
    assert f"{stopped} holds a finished run and its model; choose another out" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model"])
def test_a_killed_run_continues_from_its_last_checkpoint(tmp_path: Path, tiny_model: Path, name: str) -> None:
    """The driver and its whole Ray are killed."""
    from tests.jobs.test_reward_model import write as write_pairs

    if name != "sft":
        write_pairs(tmp_path / "train.parquet", range(22))
    settings = arguments(tmp_path, tiny_model, "killed", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=1")
    killed, log = tmp_path / "killed", tmp_path / "log"

    def start(*more: str) -> subprocess.Popen[Any]:
        command = [sys.executable, "-m", f"jobs.{name}", *settings, *more]
        with log.open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    def finish(*more: str) -> None:
        process = start(*more)
        try:
            assert process.wait(400) == 0, log.read_text()
        finally:
            kill_tree(process.pid)

    process, deadline = start(), time.monotonic() + 400
    try:
        while (saved := newest(str(killed))) is None or saved.iteration < 2:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
    finally:
        kill_tree(process.pid)
    process.wait(10)
    saved = newest(str(killed))
    assert saved is not None and 2 <= saved.iteration < STEPS and not (killed / "config.json").exists()
    finish()
    assert f"continuing after step {saved.iteration}" in log.read_text()
    finish(f"out={tmp_path / 'whole'}")
    assert_same(killed, tmp_path / "whole")
