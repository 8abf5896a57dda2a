"""A whole run on Ray with Megatron's layers, and one with pipeline stages; both go on in another layout."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.runs import tiny_settings

COMMANDS = {"megatron": ["-m", "tests.megatron.train"], "stages": ["-m", "jobs.train"]}


def run(kind: str, settings: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *COMMANDS[kind], *settings]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_run_goes_on_in_another_layout(kind: str, tiny_model: Path, prompt_files: Any, tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, tiny_model, prompt_files)
    settings += ["trainer.experiment_name=run", "trainer.num_workers=2", "trainer.save_freq=1", "rollout.name=hf"]
    settings += ["trainer.deadlines.engine_start=600", "trainer.deadlines.admission=600"]
    run(kind, [*settings, "actor.parallel.pipeline=2", "trainer.total_training_steps=2"])
    other = ["actor.parallel.tensor=2"] if kind == "megatron" else []
    done = run(kind, [*settings, *other, "trainer.total_training_steps=3"])
    lines = (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()
    records = {record["iteration"]: record for record in map(json.loads, lines)}
    assert set(records) >= {1, 2, 3} and "engine and trainer agree" in done.stdout
    # Engines generate with the weights that the trainer has published.
    for number in (1, 2, 3):
        gaps = {name: value for name, value in records[number].items() if "diff" in name and "max" in name}
        assert gaps and all(value < 1e-3 for value in gaps.values()), gaps
    assert records[2]["actor/grad_norm"] > 0
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (tiny_model, tmp_path / "runs/run/model"))
    moved = dict(after.named_parameters())
    assert any(not torch.equal(weight, moved[name].to(weight.dtype)) for name, weight in before.named_parameters())
