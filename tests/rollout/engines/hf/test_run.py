"""A whole run on a machine without vLLM: importing it fails in every process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs import tiny_settings

WITHOUT = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
"""


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_run_needs_no_vllm(tiny_model: Path, prompt_files: Any, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    settings = tiny_settings(tmp_path, tiny_model, prompt_files)
    more = ["trainer.experiment_name=without", "trainer.total_training_steps=3", "trainer.num_workers=2"]
    more += ["rollout.name=hf", "trainer.deadlines.engine_start=600", "trainer.deadlines.admission=600"]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    command = [sys.executable, "-m", "jobs.train", *settings, *more]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    lines = (tmp_path / "runs/without/metrics.jsonl").read_text().splitlines()
    records = {record["iteration"]: record for record in map(json.loads, lines)}
    assert set(records) >= {1, 2, 3}
    # What `tests/test_end_to_end.py` allows for vLLM.
    gaps = {name: value for name, value in records[3].items() if "diff" in name and "max" in name}
    assert all(value < 1e-3 for value in gaps.values()), gaps
    assert "starting the engines (hf)" in done.stdout and re.search(r"^ +engine +hf$", done.stdout, re.MULTILINE)
