"""Whole runs for tests: the command line on the session's Ray with everything real but a tiny policy."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import torch

from jobs import replay
from jobs.train import main
from pipeline.config import load_config

BATCH, SAMPLES, CHUNKS = 8, 4, 2
TWO = ("trainer.num_workers=2",)
# Of random text every rule would make 0; this one differs inside nearly every group.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": (len(solution_str) + extra_info["index"]) % 4 / 3, "length": len(solution_str)}
"""


@dataclass(frozen=True)
class Run:
    """A run's folder as it was when the run ended, for what a later run changes."""

    folder: Path
    records: dict[int, dict[str, Any]]
    mlflow_run_id: str
    printed: str

    @classmethod
    def of(cls, folder: Path, printed: str) -> "Run":
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        run_id = (folder / "mlflow_run_id").read_text().strip()
        assert [record["iteration"] for record in records] == sorted({record["iteration"] for record in records})
        return cls(folder, {record["iteration"]: record for record in records}, run_id, printed)


Start = Callable[..., Run]


def tiny_settings(folder: Path, model: Path, prompt_files: Any) -> list[str]:
    """Command line of a run in `folder`."""
    (folder / "reward.py").write_text(REWARD)
    return [
        f"data.train_files={prompt_files.train}",
        f"data.val_files={prompt_files.val}",
        f"data.train_batch_size={BATCH}",
        "data.max_prompt_length=64",
        "data.max_response_length=12",
        f"model.path={model}",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        f"rollout.n={SAMPLES}",
        f"rollout.chunk_prompts={BATCH // CHUNKS}",
        "rollout.dtype=float32",
        "rollout.enforce_eager=true",
        "rollout.max_num_seqs=32",
        # A step this large changes the log-probs by far more than the gap that is allowed between engine and trainer.
        "actor.optim.lr=1e-2",
        "trainer.ray_num_cpus=8",
        "trainer.test_freq=1",
        f"trainer.default_local_dir={folder / 'runs'}",
    ]


def starter(settings: list[str]) -> Start:
    """Runs the command line `settings` in this process, under a name and with further settings."""

    def run(name: str, *more: str) -> Run:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = main([*settings, f"trainer.experiment_name={name}", *more])
        assert code == 0, out.getvalue()
        assert ray.is_initialized(), "a Ray that was there before is left alone"
        return Run.of(folder_of(settings, name), out.getvalue())

    return run


COEF, TARGET_KL, HORIZON, LOSS_COEF = 0.1, 0.01, 64, 0.5
PPO = (
    *("algorithm=ppo", "critic.warmup=1", "critic.optim.lr=1e-2", "actor.ppo_epochs=2"),
    *("actor.use_kl_loss=true", f"actor.kl_loss_coef={LOSS_COEF}"),
    *("algorithm.kl_ctrl.type=adaptive", f"algorithm.kl_ctrl.kl_coef={COEF}"),
    *(f"algorithm.kl_ctrl.target_kl={TARGET_KL}", f"algorithm.kl_ctrl.horizon={HORIZON}"),
)
INTERRUPTED_AFTER, START_S = 2, 300.0


@dataclass(frozen=True)
class Training:
    """One PPO run: a process of its own until a signal, and one more iteration by the same command in this process.

    `first` is the run as SIGTERM left it, after iteration `last`; `before` is a copy of its folder of that time.
    """

    settings: list[str]
    exit_code: int
    first: Run
    last: int
    before: Path
    continued: Run


def train(folder: Path, model: Path, prompt_files: Any) -> Training:
    """The run whose results all end-to-end tests read."""
    settings = [*tiny_settings(folder, model, prompt_files), *PPO, *TWO]
    name, total = "trainer.experiment_name=trained", "trainer.total_training_steps="
    command = [sys.executable, "-m", "jobs.train", *settings, name, f"{total}1000"]
    run_folder = folder_of(settings, "trained")
    metrics, deadline = run_folder / "metrics.jsonl", time.monotonic() + START_S
    log = folder / "log"
    tee = subprocess.Popen(["tee", log], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)
    process = subprocess.Popen(command, stdout=tee.stdin, stderr=subprocess.STDOUT, process_group=tee.pid)
    assert tee.stdin is not None
    tee.stdin.close()
    try:
        while not metrics.is_file() or f'"iteration": {INTERRUPTED_AFTER}' not in metrics.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "no iteration within the deadline"
            time.sleep(0.1)
        # As `timeout` ends a job: the signal comes to the command and to its group, so that `tee` dies, too. All that
        # the run prints from then on meets a pipe without a reader.
        process.send_signal(signal.SIGTERM)
        os.killpg(tee.pid, signal.SIGTERM)
        assert tee.wait(timeout=60) == -signal.SIGTERM
        process.wait(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(tee.pid, signal.SIGKILL)
    first = Run.of(run_folder, (run_folder / "console.log").read_text())
    last = max(first.records)
    before = shutil.copytree(run_folder, folder / "before")
    # As a broken-off try of the next iteration would have left it: a continued run numbers its chunks from 0.
    stale = run_folder / "trajectories" / f"iteration={last + 1:06d}" / "chunk-000099.parquet"
    stale.parent.mkdir(exist_ok=True)
    shutil.copyfile(next(run_folder.glob(f"trajectories/iteration={last:06d}/*.parquet")), stale)
    continued = starter(settings)("trained", f"{total}{last + 1}")
    return Training(settings, process.returncode, first, last, before, continued)


def replayed(recorded: Path, name: str, *more: str) -> Run:
    """A replay, in this process, of the run in the folder `recorded`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = replay.main([str(recorded), f"trainer.experiment_name={name}", *more])
    assert code == 0, out.getvalue()
    return Run.of(recorded.parent / name, out.getvalue())


def folder_of(settings: list[str], name: str) -> Path:
    return Path(load_config(settings).trainer.default_local_dir) / name


def score(model: Any, rows: pa.Table) -> float:
    """Largest difference between the log-probs of the rows' tokens under `model` and those of the engine."""
    worst = 0.0
    for row in rows.to_pylist():
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].float(), -1)
        chosen = log_probs.gather(1, torch.tensor(row["response_ids"])[:, None]).squeeze(1)
        worst = max(worst, (chosen - torch.tensor(row["rollout_log_probs"])).abs().max().item())
    return worst
