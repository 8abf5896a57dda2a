"""The command line of a training run: what it refuses, how, and what it prints without starting anything."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.train import main
from pipeline.config import Config, load_config, save_yaml
from pipeline.plan.placement import Node

Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reaches Ray here fails the test."""

    def started(config: Config) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("pipeline.run.driver.start_ray", started)


@pytest.fixture
def arguments(tmp_path: Path, tiny_model: Path, prompt_files: Any) -> list[str]:
    """Settings of a run that would start."""
    return [
        f"data.train_files={prompt_files.train}",
        f"data.val_files={prompt_files.val}",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "data.max_response_length=12",
        f"model.path={tiny_model}",
        "rollout.n=4",
        "rollout.chunk_prompts=4",
        "trainer.num_workers=2",
        "trainer.ray_num_cpus=8",
        "trainer.experiment_name=mine",
        f"trainer.default_local_dir={tmp_path / 'runs'}",
    ]


@pytest.fixture
def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    """Run with further settings; the one sentence on stderr, after checking that nothing else came of it."""

    def run(*settings: str, parts: tuple[str, ...]) -> str:
        code = main([*arguments, *settings])
        printed = capsys.readouterr()
        assert code == 2, printed
        assert printed.out == ""
        sentence = printed.err.strip()
        assert sentence.startswith("error: ") and "Traceback" not in sentence and len(sentence.splitlines()) == 1
        for part in parts:
            assert part in sentence, sentence
        assert not (tmp_path / "runs" / "mine" / "metrics.jsonl").exists()
        return sentence

    return run


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["data.train_batch_size=10"], ("data.train_batch_size=10", "10 = 2 x rollout.chunk_prompts=4 + 2", "8 or 12")),
        (["trainer.num_workers=3"], ("8 / 4 = 2", "trainer.num_workers=3", "12")),
        (["trainer.ray_num_cpus=2"], ("trainer.ray_num_cpus=2", "trainer.num_workers", "= 5 CPUs")),
        (["data.train_bach_size=8"], ("data.train_bach_size", "did you mean data.train_batch_size?")),
        (["trainer.total_epochs=1", "data.train_batch_size=48"], ("40", "48", "trainer.total_training_steps")),
        (["data.train_files=nowhere.parquet"], ("data.train_files", "nowhere.parquet does not exist")),
        (["data.prompt_key=promt"], ("no column 'promt'", "data.prompt_key")),
        (["data.max_prompt_length=4"], ("row ", "data.truncation=left|right|middle")),
        (["model.path=./nowhere"], ("model.path", "there is no folder")),
        (["reward.custom_reward_function.path=nowhere.py"], ("no Python file",)),
        (["data.max_prompt_length=2040"], ("2040 + 12 = 2052", "the 2048 of the model", "max_position_embeddings")),
    ],
)
def test_settings_that_cannot_be_run(refused: Refused, settings: list[str], parts: tuple[str, ...]) -> None:
    refused(*settings, parts=parts)


def test_run_folder_of_another_run(refused: Refused, arguments: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    save_yaml(load_config(arguments), folder / "config.yaml")
    parts = (str(folder), "trainer.seed (1 there, 7 now)", "trainer.experiment_name")
    refused("trainer.seed=7", parts=parts)
    refused("trainer.resume=never", parts=(str(folder), "already holds a run", "trainer.resume=never"))
    (folder / "config.yaml").rename(folder / "notes.txt")
    refused(parts=(str(folder), "is not a run", "trainer.experiment_name"))


def test_dry_run_prints_the_plan_and_starts_nothing(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    # Options may stand between settings.
    assert main([*arguments[:3], "--dry-run", *arguments[3:]]) == 0
    printed = capsys.readouterr()
    for part in ("8 prompts x 4 samples = 32 rows in 2 chunks of 4 prompts", "iterations", "rollout", "CPU"):
        assert part in " ".join(printed.out.split())
    assert not (tmp_path / "runs").exists()
    for part in (f"{tmp_path}/runs/mine", "first prompt", "reward of a made-up response"):
        assert part in printed.out


def test_dry_run_prints_the_plan_where_gpus_are_missing(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    gpus = ["trainer.use_gpu=true", "trainer.gpus_per_worker=1", "trainer.num_workers=2"]
    monkeypatch.setattr("pipeline.plan.placement.local_node", lambda cpus: Node({"CPU": 8.0, "GPU": 0.0}))
    monkeypatch.setattr("jobs.train.check_versions", lambda: None)
    assert main(["--dry-run", *arguments, *gpus]) == 0
    printed = capsys.readouterr().out
    assert "2 x 1 CPU + 1 GPU" in printed
    assert "this machine cannot run it: the run needs" in printed and "2 GPUs and this machine has 0" in printed


def test_help_of_the_command() -> None:
    """In a process of its own: neither Ray nor torch is needed for it, so it comes at once."""
    code = (
        "import sys; from jobs.train import main\n"
        "try: main(['--help'])\n"
        "finally: print('loaded:', [name for name in ('ray', 'torch', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for part in ("--dry-run", "--config-dir", "experiment=countdown_cpu", "docs/configuration.md", "loaded: []"):
        assert part in done.stdout
