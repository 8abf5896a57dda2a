"""The plan of a supervised run: steps, tokens and memory, and `--dry-run`."""

from pathlib import Path
from typing import Any

import pytest

from jobs import dpo, reward_model, sft
from pipeline.config import ConfigError, load
from pipeline.config.supervised import SFTConfig
from pipeline.supervised import plan as module
from pipeline.supervised.plan import plan
from pipeline.supervised.sft_data import SFTEncoder
from tests.jobs.test_reward_model import write as write_pairs
from tests.supervised.test_sft import write

DRY = ("--dry-run", "data.train_batch_size=8")


def settings(model: Path, files: Path, *more: str) -> SFTConfig:
    return load(SFTConfig, [f"model.path={model}", f"data.train_files={files}", *more], "sft")


def groups(config: SFTConfig) -> list[Any]:
    return SFTEncoder.find_row_groups(config.data.train_files, "data.train_files", config.data)


def test_steps_and_epochs(tmp_path: Path, tiny_model: Path) -> None:
    files = write(tmp_path / "a.parquet", 44)
    more = ["data.train_batch_size=8", "trainer.total_epochs=2", "data.val_max_samples=5"]
    config = settings(tiny_model, files, *more)
    found = plan(config, groups(config), groups(config), causal=True, sides=1)
    assert (found.rows, found.val_rows, found.steps, found.epochs) == (44, 5, 11, 2)
    config.trainer.total_training_steps = 12
    assert plan(config, groups(config), [], causal=True, sides=1).epochs == 3
    config.trainer.total_training_steps, config.data.train_batch_size = None, 90
    with pytest.raises(ConfigError, match="holds 44 rows, less than one data.train_batch_size=90"):
        plan(config, groups(config), [], causal=True, sides=1)


def test_memory_follows_the_model_and_the_passes(tmp_path: Path, tiny_model: Path) -> None:
    files = write(tmp_path / "a.parquet", 44)
    config = settings(tiny_model, files, "data.train_batch_size=8")
    # A worker has at most 8 rows of 2,048 tokens, or of a pair two.
    assert plan(config, groups(config), [], causal=True, sides=1).pass_tokens == 16384
    config.data.max_length = 100
    assert plan(config, groups(config), [], causal=True, sides=2).pass_tokens == 1600
    config.data.max_length = 2048
    whole = plan(config, groups(config), [], causal=True, sides=1).memory
    scored = plan(config, groups(config), [], causal=False, sides=1).memory
    config.trainer.max_token_len_per_gpu //= 2
    half = plan(config, groups(config), [], causal=True, sides=1)
    assert whole and scored and half.memory
    assert whole.train_weights == 4 * whole.parameters and whole.train_optimizer == 8 * whole.parameters
    assert half.memory.train_activations * 2 == whole.train_activations
    assert scored.train_logits < whole.train_logits
    config.trainer.num_workers = 2
    two = plan(config, groups(config), [], causal=True, sides=1).memory
    assert two and two.train_weights * 2 == whole.train_weights
    config.model.path = "owner/name"
    assert plan(config, groups(config), [], causal=True, sides=1).memory is None


def test_a_lack_of_memory_is_said(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(tiny_model, write(tmp_path / "a.parquet", 44), "data.train_batch_size=8")
    found = plan(config, groups(config), [], causal=True, sides=1)
    assert found.lacking() is None
    monkeypatch.setattr(module, "machine_memory", lambda: 2**20)
    out = f"out={tmp_path / 'out'}"
    capsys.readouterr()
    assert sft.main([f"model.path={tiny_model}", f"data.train_files={tmp_path / 'a.parquet'}", out, *DRY]) == 2
    assert "this machine cannot run it: the run needs about" in capsys.readouterr().out
    lacking = found.lacking()
    assert lacking and "of memory and this machine has 1 MiB; lower trainer.max_token_len_per_gpu=16384" in lacking


@pytest.mark.parametrize("job", [sft, dpo, reward_model], ids=lambda job: job.__name__)
def test_dry_run_shows_the_plan_and_starts_nothing(
    job: Any, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.supervised.start_ray", lambda config: pytest.fail("Ray was started"))
    monkeypatch.setenv("COLUMNS", "200")
    write_it = write if job is sft else lambda path, count: write_pairs(path, range(count))
    files = write_it(tmp_path / "a.parquet", 20)
    start = [f"out={tmp_path / 'out'}", f"model.path={tiny_model}", f"data.train_files={files}"]
    assert job.main([*start, "--dry-run", "data.train_batch_size=8", "trainer.total_epochs=2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("rows │ 20 to train on, 0 for validation", "steps │ 5 of 8 rows, in 2 epochs", "in all steps;"):
        assert part in shown
    assert "memory of a train worker" in shown and "of this machine's" in shown and "<|im_start|>user" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet"]
    assert job.main([*start, "--dry-run", "data.train_batch_size=80"]) == 2
    assert "less than one data.train_batch_size=80" in capsys.readouterr().err


def test_unknown_trackers_are_refused(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = [f"out={tmp_path / 'out'}", f"model.path={tiny_model}", "data.train_files=x", "trainer.logger=[mlfow]"]
    for job in (sft, dpo, reward_model):
        assert job.main(start) == 2
        assert "trainer.logger: mlfow is unknown; choose from console, mlflow" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        (sft, "has no vision_config in its config.json, but model.vision=frozen"),
        (dpo, "model.vision=frozen: dpo cannot read images, only sft and train can; leave it out"),
        (reward_model, "model.vision=frozen: reward_model cannot read images, only sft and train can; leave it out"),
    ],
    ids=["sft", "dpo", "reward_model"],
)
def test_runs_that_cannot_read_images(
    job: Any, sentence: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write(tmp_path / "a.parquet", 44)
    given = [f"model.path={tiny_model}", f"data.train_files={files}", f"out={tmp_path / 'out'}", "model.vision=frozen"]
    assert job.main([*given, *DRY]) == 2
    assert sentence in capsys.readouterr().err
