"""Whole runs for tests: the command line on the session's Ray with everything real but a tiny policy."""

import contextlib
import io
import json
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
