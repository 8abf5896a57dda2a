"""The demo: its steps, what it leaves out, and what it refuses before the first of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs import demo
from jobs.demo import SFT, TASKS, Demo, main
from jobs.prepare.__main__ import DATASETS, Parser
from pipeline.config import load, load_config
from pipeline.config.supervised import SFTConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The steps that a demo in an empty folder takes; each makes its file."""
    taken: list[list[str]] = []

    def step(job: str, *arguments: object) -> None:
        words = [str(argument) for argument in arguments]
        taken.append([job, *words])
        if job == "sft":
            made = Path(words[0].removeprefix("out="), "config.json")
        else:
            made = Path(words[words.index("--out") + 1], "config.json") if "--out" in words else Path("run")
        made = made.with_name("sft_train.parquet") if job == "prepare" else made
        made.parent.mkdir(parents=True, exist_ok=True)
        made.touch()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "step", step)
    return taken


@pytest.mark.parametrize("task", TASKS)
def test_a_demo_makes_a_model_once_and_trains_it(task: str, steps: list[list[str]]) -> None:
    assert main(["--task", task, "--seed", "3", "--only-model"]) == 0
    assert [job for job, *_ in steps] == ["prepare", "tiny", "sft"]
    assert main(["--task", task, "--seed", "3", "trainer.total_training_steps=2"]) == 0
    (job, *settings) = steps[-1]
    assert len(steps) == 4 and job == "train" and settings[-1] == "trainer.total_training_steps=2"
    config = load_config(settings)
    assert config.trainer.experiment_name == f"{task.replace('_', '-')}-cpu-3" and config.trainer.seed == 3
    assert config.model.path == steps[2][1].removeprefix("out=")
    assert Path(config.data.train_files).parent == Path(steps[0][3])
    # A part of the demo that exists is not made again.
    Path(f"data/{task}-3/sft_train.parquet").unlink()
    assert main(["--task", task, "--seed", "3", "--only-model"]) == 0
    assert [job for job, *_ in steps[4:]] == ["prepare"]


@pytest.mark.parametrize("task", TASKS)
def test_the_options_of_a_task_are_those_of_the_jobs(task: str) -> None:
    parser = Parser()
    DATASETS[task].add_arguments(parser)
    prepared = parser.parse_args(["--out", "data", *TASKS[task].prepare.split(), "--seed", "1"])
    assert prepared.seed == 1
    sft = load(SFTConfig, SFT.split(), "sft")
    assert (sft.data.train_batch_size, sft.optim.lr, list(sft.optim.betas)) == (64, 2e-3, [0.9, 0.98])


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (None, ["experiment=countdown_cpu"]),
        ("dapo", ["experiment=countdown_cpu", "algorithm=dapo"]),
        ("ppo", ["experiment=countdown_cpu_ppo"]),
        ("lora", ["experiment=countdown_cpu_lora"]),
    ],
)
def test_an_algorithm_may_have_an_experiment_of_its_own(algorithm: str | None, settings: list[str]) -> None:
    found = Demo.here("countdown", 1).settings(algorithm)
    assert found[: len(settings)] == settings and found[len(settings)] == "trainer.seed=1"
    assert f"trainer.experiment_name=countdown-cpu-1{f'-{algorithm}' if algorithm else ''}" in found


@pytest.mark.parametrize(
    ("arguments", "part"), [(["--algorithm", "nope"], "nope"), (["actor.optim.rl=1"], "actor.optim.rl")]
)
def test_wrong_settings_are_refused_before_the_first_step(
    arguments: list[str], part: str, steps: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert part in capsys.readouterr().err and not steps


def test_a_step_that_fails_ends_the_demo_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails.py").write_text("import sys; sys.exit(3 if 'prepare' in sys.argv else 0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "COMMAND", tmp_path / "fails.py")
    assert main([]) == 3


def test_an_interrupted_demo_waits_for_its_step(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), pathlib.Path('saved').touch(), sys.exit(1)))\n"
        "pathlib.Path('ready').touch()\ntime.sleep(60)\n"
    )
    code = f"import sys; from jobs import demo; demo.COMMAND = {str(tmp_path / 'slow.py')!r}; sys.exit(demo.main([]))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
    try:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143 and (tmp_path / "saved").exists()
    assert b"interrupted; the same command continues" in error


def test_make_demo_is_the_command() -> None:
    recipe = (ROOT / "Makefile").read_text()
    assert "DEMO := slipstream.py demo" in recipe and "jobs.tiny" not in recipe
