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
from pipeline.plan.host import multiplies_bfloat16
from tests.recordings import record
from tests.track.run_folders import write_run

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
        if job == "prepare":
            made = made.with_name("train.parquet" if words[0] == "sums" else "sft_train.parquet")
        made.parent.mkdir(parents=True, exist_ok=True)
        made.touch()

    monkeypatch.chdir(tmp_path)

    def fetch(folder: Path) -> Path:
        taken.append(["fetch"])
        return folder / "smollm2.gguf"

    monkeypatch.setattr(demo, "step", step)
    monkeypatch.setattr(demo, "fetch", fetch)
    monkeypatch.setattr(demo, "show", lambda run_dir: taken.append(["show", str(run_dir)]))
    return taken


@pytest.mark.parametrize("task", TASKS)
def test_a_demo_makes_a_model_once_and_trains_it(task: str, steps: list[list[str]]) -> None:
    assert main(["--task", task, "--seed", "3", "--only-model"]) == 0
    assert [job for job, *_ in steps] == ["prepare", "tiny", "sft"]
    assert main(["--task", task, "--seed", "3", "trainer.total_training_steps=2"]) == 0
    (job, *settings), shown = steps[3:]
    assert job == "train" and settings[-1] == "trainer.total_training_steps=2"
    assert shown == ["show", f"runs/{task.replace('_', '-')}-cpu-3"]
    config = load_config(settings)
    assert config.trainer.experiment_name == f"{task.replace('_', '-')}-cpu-3" and config.trainer.seed == 3
    assert config.model.path == steps[2][1].removeprefix("out=")
    assert Path(config.data.train_files).parent == Path(steps[0][3])
    # A part of the demo that exists is not made again.
    Path(f"data/{task}-3/sft_train.parquet").unlink()
    assert main(["--task", task, "--seed", "3", "--only-model"]) == 0
    assert [job for job, *_ in steps[5:]] == ["prepare"]


def test_a_pretrained_model_is_fetched_once_and_learns_sums(steps: list[list[str]]) -> None:
    assert main(["--model", "smollm2", "--seed", "3", "trainer.default_local_dir=elsewhere"]) == 0
    prepare, fetch, convert, (job, *settings), shown = steps
    assert prepare == ["prepare", "sums", "--out", "data/sums-3", "--seed", "3"] and fetch == ["fetch"]
    assert convert == ["from_gguf", "models/smollm2.gguf", "--out", "models/smollm2"]
    config = load_config(settings)
    assert job == "train" and config.trainer.experiment_name == "sums-smollm2-3" and config.trainer.seed == 3
    assert config.model.path == "models/smollm2" and config.data.val_files == "data/sums-3/test.parquet"
    assert (config.data.train_batch_size, config.rollout.n, config.actor.optim.lr) == (16, 8, 1e-5)
    assert shown == ["show", "elsewhere/sums-smollm2-3"]
    assert main(["--model", "smollm2", "--seed", "3", "--only-model"]) == 0 and len(steps) == 5


@pytest.mark.parametrize(
    ("model", "folder", "tag", "jobs"),
    [
        ("mine/Some.Q4_0.gguf", "models/Some.Q4_0", "Some.Q4_0", ["prepare", "from_gguf"]),
        ("mine/folder", "mine/folder", "folder", ["prepare"]),
        ("owner/Model-1B", "owner/Model-1B", "Model-1B", ["prepare"]),
    ],
)
def test_a_model_of_ones_own_is_not_fetched(
    model: str, folder: str, tag: str, jobs: list[str], steps: list[list[str]]
) -> None:
    assert main(["--model", model]) == 0
    assert [job for job, *_ in steps] == [*jobs, "train", "show"]
    settings = steps[-2][1:]
    assert f"model.path={folder}" in settings and f"trainer.experiment_name=sums-{tag}-1" in settings


@pytest.mark.parametrize(
    ("flags", "dtype"), [("avx2 amx_bf16", "bfloat16"), ("avx512_bf16", "bfloat16"), ("avx2 avx512f", "float32")]
)
def test_a_real_model_computes_in_bfloat16_if_the_processor_can(
    flags: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu sse {flags}\n")
    monkeypatch.setattr(demo, "multiplies_bfloat16", lambda: multiplies_bfloat16(cpuinfo))
    config = load_config(Demo.here("countdown", 1, "smollm2").settings(None))
    assert config.actor.fsdp.compute_dtype(config.model.dtype, gpu=False) == dtype
    assert not multiplies_bfloat16(tmp_path / "missing")


def test_the_model_and_the_task_are_one_choice(steps: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "smollm2", "--task", "lookup"])
    assert "not allowed with argument" in capsys.readouterr().err and not steps


def test_a_model_that_cannot_be_had_ends_the_demo(
    steps: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(folder: Path) -> Path:
        raise OSError("SmolLM2 could not be downloaded")

    monkeypatch.setattr(demo, "fetch", fetch)
    assert main(["--model", "smollm2"]) == 2
    assert "SmolLM2 could not be downloaded" in capsys.readouterr().err
    assert [job for job, *_ in steps] == ["prepare"]


def test_the_end_shows_figures_and_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", {"iteration": 0, "val-core/countdown/acc/mean@1": 0.25}, {"iteration": 2})
    demo.show(run)
    out = capsys.readouterr().out
    assert "validation countdown" in out and "2 iterations" in out and "prompt" not in out
    for version in (0, 2):
        record(run, [version], split="val", chunk=-1, iteration=version)
    demo.show(run)
    out = capsys.readouterr().out
    assert "version 0" in out and "version 2" in out and "question 0" in out


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
    assert "demo $(if $(MODEL),--model $(MODEL),--task $(TASK)) --seed $(SEED)" in recipe


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """Return what make would run; it does not install."""
    return subprocess.run(
        ["make", "--dry-run", "--assume-old=.venv/.installed-cpu", "ACCELERATOR=cpu", *words],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip


def test_make_passes_settings_on() -> None:
    made = make("demo", "MODEL=smollm2", "SEED=4", "ARGS=rollout.n=16 actor.optim.lr=2e-5")
    assert "demo --model smollm2 --seed 4  rollout.n=16 actor.optim.lr=2e-5" in made.stdout, made.stderr


def test_make_refuses_a_variable_that_it_does_not_know() -> None:
    made = make("demo", "SEDE=4")
    assert made.returncode and "SEDE is not a variable of this Makefile; it has MODEL TASK SEED" in made.stderr
