"""The cases with a real model: their settings and data, and the checks of their results, without running them."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import real_model
from benchmarks.real_model import CASES, GAP, Memory, make_data, run_case, settings
from jobs.dpo import JOB as DPO
from jobs.reward_model import JOB as REWARD_MODEL
from jobs.sft import JOB as SFT
from pipeline.config import load, load_config
from pipeline.plan.checks import check
from pipeline.reward.rules import rule_of
from tests.jobs.prepared import read
from tests.track.run_folders import write_run

JOBS: dict[str, Any] = {"sft": SFT, "dpo": DPO, "reward_model": REWARD_MODEL}


@pytest.mark.parametrize("name", CASES)
def test_the_settings_of_a_case_are_sound(name: str, tmp_path: Path, tiny_model: Path) -> None:
    words = settings(name, tiny_model, make_data(tmp_path / "data"), tmp_path / name)
    if CASES[name].job == "train":
        config = load_config(words)
        check(config)
        assert Path(config.trainer.default_local_dir) / config.trainer.experiment_name == tmp_path / name
    else:
        job = JOBS[CASES[name].job]
        job.check(load(job.schema, words, job.name))


def test_right_sums_are_right_and_preferred(tmp_path: Path) -> None:
    files = make_data(tmp_path)
    for row, pair in zip(read(files["sums"]), read(files["pairs"]), strict=True):
        truth, rule = row["reward_model"]["ground_truth"], rule_of(row["data_source"])
        assert pair["prompt"] == row["prompt"]
        assert rule(pair["chosen"][0]["content"], truth)["acc"] == 1
        assert rule(pair["rejected"][0]["content"], truth)["acc"] == 0


@pytest.mark.parametrize(
    ("metrics", "files", "problem"),
    [
        ({"actor/grad_norm": 0.5, GAP: 1e-5}, ("config.json", "model.safetensors"), None),
        ({"actor/grad_norm": 0.5, GAP: 1e-5}, ("config.json",), "wrote no model.safetensors"),
        ({"actor/grad_norm": 0.5, GAP: 0.2}, ("config.json", "model.safetensors"), "0.2 nats apart"),
        ({GAP: 1e-5}, ("config.json", "model.safetensors"), "has no finite actor/grad_norm"),
        ({"actor/grad_norm": math.nan, GAP: 1e-5}, ("config.json", "model.safetensors"), "no finite actor/grad_norm"),
    ],
)
def test_results_are_checked(
    metrics: dict[str, float],
    files: tuple[str, ...],
    problem: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(command: list[str], *_: Any, **__: Any) -> None:
        folder = write_run(tmp_path / "out" / "grpo", {"iteration": 1}, {"iteration": 2, **metrics})
        (folder / "model").mkdir()
        for file in files:
            (folder / "model" / file).touch()

    monkeypatch.setattr(real_model, "call", call)
    if problem is None:
        assert run_case("grpo", tmp_path, tmp_path / "out", 1.0).metrics == metrics
    else:
        with pytest.raises(RuntimeError, match=problem):
            run_case("grpo", tmp_path, tmp_path / "out", 1.0)


def test_memory_is_that_of_the_processes_that_were_started_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_model, "EVERY_S", 0.05)
    memory = Memory()
    memory.start()
    hold = "import time; held = bytearray(range(256)) * (300 << 12); print(flush=True); time.sleep(600)"
    # A grandchild counts, too.
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None and child.stdout.readline() == b"\n"
    while memory.peak < 300 << 20:
        time.sleep(0.05)
    memory.stop()
    real_model.psutil.Process(child.pid).children()[0].kill()
    child.wait()
    assert memory.peak < 600 << 20


def test_a_case_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(name: str, *_: Any) -> real_model.Outcome:
        ran.append(name)
        if name == "dpo":
            raise RuntimeError("dpo failed with exit code 1")
        return real_model.Outcome(name, 60.0, 7.25, {GAP: 1e-5})

    monkeypatch.setattr(real_model, "run_case", run)
    command = ["--model", str(tmp_path), "--out", str(tmp_path), "--cases", "dpo", "ppo"]
    assert real_model.main(command) == 1 and real_model.main(command) == 1
    assert ran == ["dpo", "ppo", "dpo"], "a finished case is not run again"
    shown = capsys.readouterr().out
    assert "7.2" in shown and "1.0e-05" in shown and "dpo failed with exit code 1" in shown
    assert json.loads((tmp_path / "ppo.json").read_text())["memory_gib"] == 7.25
