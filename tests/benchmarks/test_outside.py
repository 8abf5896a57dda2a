"""The outside checks' settings, and the reading of their results."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import outside
from benchmarks.outside import CHECKS, KL, outcome, training
from pipeline.config import load_config
from pipeline.derived import rollout_correction
from pipeline.plan.checks import check

REWARD, RIGHT = "val-aux/reverse_text/reward/mean@1", "val-core/reverse_text/acc/mean@1"


def records(first: float = 0.4, last: float = 0.7, mismatch: float = 1e-6) -> list[dict[str, Any]]:
    gaps = [
        {"iteration": number, "elapsed_s": 60.0 * number, KL: 0.5 if number < 3 else mismatch}
        for number in (1, 2, 3, 4, 5)
    ]
    gaps[-1] |= {REWARD: last, RIGHT: 0.5}
    return [{"iteration": 0, "elapsed_s": 30.0, REWARD: first, RIGHT: 0.25}, *gaps]


def test_the_first_and_the_last_validation_and_the_last_gaps_count() -> None:
    found = outcome("reverse_text", 3, records())
    assert (found.iterations, found.reward, found.accuracy, found.minutes) == (5, (0.4, 0.7), (0.25, 0.5), 5.0)
    assert found.mismatch == pytest.approx(1e-6) and not found.problems
    flat, off = outcome("reverse_text", 3, records(last=0.5)), outcome("reverse_text", 4, records(mismatch=0.02))
    assert flat.problems == ["seed 3: the reward rose from 0.400 to 0.500, by less than 0.2"]
    assert off.problems == ["seed 4: the mismatch KL is 2.0e-02, not below 0.01"]


def test_a_run_without_two_validations_or_the_metric_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 validations"):
        outcome("reverse_text", 1, records()[:-1])
    with pytest.raises(ValueError, match="0 iterations with rollout_corr/k3_kl"):
        outcome("reverse_text", 1, [{REWARD: 0.1}, {REWARD: 0.4}])


@pytest.mark.parametrize("name", CHECKS)
def test_the_experiment_of_a_check_is_sound_and_reports_the_mismatch(name: str, tmp_path: Path) -> None:
    config = load_config(
        training(name, tmp_path / "model", tmp_path, 7, tmp_path / "run-7", ["data.train_batch_size=32"])
    )
    config.model.path = "org/model"
    check(config)
    assert rollout_correction(config).rollout_is == "token", "the metric KL exists only then"
    assert config.trainer.total_training_steps % config.trainer.test_freq == 0, "the last iteration is validated"
    assert config.trainer.seed == 7 and config.data.train_batch_size == 32
    assert config.rollout.val_kwargs.temperature == 1 and config.data.val_files == str(tmp_path / "test.parquet")


def test_finished_steps_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs: list[str] = []
    given: dict[str, list[str]] = {}

    def call(command: list[str], *_: Any, **__: Any) -> None:
        jobs.append(command[2])
        given[command[2]] = command
        if command[2] == "jobs.prepare":
            (tmp_path / "data-1").mkdir()
            (tmp_path / "data-1" / "train.parquet").touch()
        elif command[2] == "jobs.sft":
            (tmp_path / "sft-1").mkdir()
            (tmp_path / "sft-1" / "config.json").touch()
        else:
            raise RuntimeError("the engine died")

    monkeypatch.setattr(outside, "call", call)
    command = ["reverse_text", "--model", str(tmp_path), "--out", str(tmp_path)]
    command += ["--sft", "optim.lr=1e-4", "--", "rollout.n=4"]
    assert outside.main(command) == 2 and "the engine died" in capsys.readouterr().err
    assert jobs == ["jobs.prepare", "jobs.sft", "jobs.train"]
    assert given["jobs.sft"][-1] == "optim.lr=1e-4" and given["jobs.train"][-1] == "rollout.n=4"
    made = records()
    made[-1]["iteration"] = 20
    monkeypatch.setattr(outside, "read_history", lambda path: made)
    assert outside.main(command) == 0 and jobs[3:] == []
    assert "0.400 to 0.700" in capsys.readouterr().out
    monkeypatch.setattr(outside, "read_history", lambda path: [*made[:-1], {**made[-1], REWARD: 0.5}])
    assert outside.main(command) == 1
