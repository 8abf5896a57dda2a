"""The comparison with TRL, without Ray and without TRL: settings of both sides, what is read, the verdict."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks import against_trl, command, trl_env
from benchmarks.against_trl import SIDE, WAYS, Runner, ours, parse, theirs
from benchmarks.command import call
from benchmarks.trl_report import (
    AHEAD,
    SYNCHRONOUS,
    TRL,
    Outcome,
    as_json,
    between_steps,
    complaints,
    ratios,
    table,
    trl_parts,
    warnings,
)
from pipeline.config import Config, load_config
from pipeline.plan.checks import check

SAMPLES = 512


def config_of(case: str = SYNCHRONOUS, *more: str) -> Config:
    return load_config(ours(parse(["--out", "out", *more]), Path("/data"), Path("/model"), case))


def outcome(seconds: float, length: float = 10.0) -> Outcome:
    record = {"timing_s/step": seconds - 0.25, "seconds": seconds, "generate_s": 0.5, "prepare_s": 0.25, "rest": 0.25}
    return Outcome([seconds] * 4, [length] * 4, [0.3] * 4, 1.0, [record] * 4)


def a_round(trl: float, synchronous: float, ahead: float, **lengths: float) -> dict[str, Outcome]:
    return {TRL: outcome(trl), SYNCHRONOUS: outcome(synchronous, **lengths), AHEAD: outcome(ahead)}


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`trl_side.py` where TRL is a stand-in that keeps what it is given."""
    trl, datasets = ModuleType("trl"), ModuleType("datasets")
    trl.GRPOConfig, trl.GRPOTrainer, datasets.load_dataset = SimpleNamespace, object, None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trl", trl)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    spec = importlib.util.spec_from_file_location("side_of_trl", SIDE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_our_cases_are_the_experiment_and_differ_in_staleness_alone(tmp_path: Path) -> None:
    strict, ahead = config_of(SYNCHRONOUS), config_of(AHEAD)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    for config in (strict, ahead):
        config.model.path = str(tmp_path)
        check(config)
        assert (config.data.train_batch_size, config.rollout.n, config.data.max_response_length) == (64, 8, 32)
        assert config.trainer.total_training_steps == 3 + 20 + 1, "the last iteration does not count"
        assert config.data.train_files == "/data/train.parquet" and config.data.val_files is None
        assert config.trainer.test_freq == config.trainer.save_freq == -1
    assert (strict.algorithm.max_staleness, ahead.algorithm.max_staleness) == (0, 1)
    assert strict.trainer.max_log_prob_gap is not None and ahead.trainer.max_log_prob_gap is None


@pytest.mark.parametrize("way", WAYS)
def test_trl_does_the_same_work(side: ModuleType, way: str) -> None:
    config = config_of(SYNCHRONOUS, "--", "actor.optim.lr=3e-4", "rollout.temperature=0.9")
    settings = theirs(config, WAYS[way], 2, Path("/out"), 23, 5)
    made, processes = side.arguments(settings), WAYS[way].processes
    assert settings["threads"] * processes == 2
    assert settings["train_file"] == "/data/train.parquet" and settings["model"] == "/model"
    assert made.generation_batch_size == 64 * 8 and made.num_generations == 8
    # Four optimiser steps of 128 rows an iteration.
    assert made.per_device_train_batch_size * made.gradient_accumulation_steps * processes == 128
    assert made.max_steps == 23 * 4 and made.logging_steps == 4
    assert (made.max_completion_length, made.temperature, made.learning_rate) == (32, 0.9, 3e-4)
    assert (made.weight_decay, made.max_grad_norm, made.epsilon, made.beta) == (0.01, 1.0, 0.2, 0.0)
    assert made.seed == 5 and made.use_cpu and not made.bf16 and not made.gradient_checkpointing
    assert made.use_transformers_continuous_batching == (way == "continuous")


def test_micro_batches_divide_a_mini_batch() -> None:
    one_step = config_of(SYNCHRONOUS, "--", "actor.ppo_mini_batch_size=null", "data.train_batch_size=24")
    settings = theirs(one_step, WAYS["one"], 2, Path(), 1, 1)
    assert settings["mini_batches"] == 1 and settings["micro_batch"] * settings["accumulation"] == 24 * 8
    assert settings["micro_batch"] == 96
    odd = config_of(SYNCHRONOUS, "--", "data.train_batch_size=1", "actor.ppo_mini_batch_size=1", "rollout.n=3")
    with pytest.raises(ValueError, match="3 samples do not make 1 mini-batches of 2 processes"):
        theirs(odd, WAYS["two"], 2, Path(), 1, 1)


@pytest.mark.parametrize("setting", ["actor.ppo_epochs=2", "actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"])
def test_what_trl_is_not_told_to_do_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match="without a KL"):
        theirs(config_of(SYNCHRONOUS, "--", setting), WAYS["one"], 2, Path(), 1, 1)


def test_the_reward_is_our_rule(side: ModuleType) -> None:
    score = side.reward(theirs(config_of(), WAYS["one"], 2, Path(), 1, 1)["rule"])
    rows = [{"ground_truth": {"target": 48, "numbers": [8, 30, 26]}}] * 3
    answers = ("<answer>30 + (26 - 8)</answer>", "<answer>30</answer>", "no")
    texts = [[{"role": "assistant", "content": text}] for text in answers]
    assert score(prompts=[], completions=texts, completion_ids=[], reward_model=rows, trainer_state=None) == [1, 0.1, 0]


def test_ratios_are_those_within_a_round_and_the_median_decides() -> None:
    # The machine is twice as slow in the second round.
    rounds = [a_round(3.0, 2.0, 1.5), a_round(6.0, 4.0, 3.0), a_round(3.0, 4.0, 3.0)]
    assert ratios(rounds, SYNCHRONOUS, SAMPLES) == pytest.approx([1.5, 1.5, 0.75])
    assert ratios(rounds, AHEAD, SAMPLES) == pytest.approx([2.0, 2.0, 1.0])
    assert complaints(rounds, SAMPLES) == []
    slow = [a_round(3.0, 2.0, 1.5), a_round(3.0, 4.0, 1.5), a_round(3.0, 4.0, 1.5)]
    assert complaints(slow, SAMPLES) == [
        "strictly on-policy, ours makes 0.75 of TRL's samples per second, less than 1"
    ]  # fmt: skip
    content = as_json(rounds, SAMPLES)
    assert json.loads(json.dumps(content))["ratio"][AHEAD] == pytest.approx([2.0, 2.0, 1.0])
    assert table(rounds, SAMPLES).row_count == 3 and trl_parts(rounds).row_count == 4
    assert between_steps(rounds, AHEAD) == pytest.approx(0.25)


def test_responses_of_another_length_are_no_fair_comparison() -> None:
    assert warnings([a_round(1, 1, 1)]) == warnings([a_round(1, 1, 1, length=10.9)]) == []
    (warning,) = warnings([a_round(1, 1, 1, length=11.5)])
    assert "ours, synchronous have 11.5 tokens" in warning and "TRL's 10.0" in warning


def test_a_run_that_fails_or_hangs_is_told_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    with pytest.raises(RuntimeError, match="(?s)exit code 3; see .*log.*the reason"):
        call([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], log, 30)
    with pytest.raises(RuntimeError, match="longer than 1 s"):
        call([sys.executable, "-c", "import time; time.sleep(600)"], log, 1)
    monkeypatch.setattr(command, "ENDING_S", 0.5)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(600)"
    with pytest.raises(RuntimeError, match="longer than 2 s"):
        call([sys.executable, "-uc", deaf], log, 2)


@pytest.mark.parametrize(("synchronous", "code"), [(1.0, 0), (2.5, 1)])
def test_cases_take_turns_and_the_fastest_way_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synchronous: float, code: int
) -> None:
    runs = []

    def trl(self: Runner, way: Any, name: str, seed: int, steps: int) -> Outcome:
        runs.append((name, way.processes, seed, steps))
        return outcome(2.0 if way.processes == 2 else 3.0)

    def own(self: Runner, case: str, name: str, seed: int) -> Outcome:
        runs.append((name, case, seed, self.args.steps))
        records = {"timing_s/gen": 0.5, "timing_s/step": 0.9}
        seconds = synchronous if case == SYNCHRONOUS else 1.0
        return Outcome([seconds] * 4, [10.0] * 4, [0.3] * 4, 0.0, [records] * 4)

    monkeypatch.setattr(Runner, "trl", trl)
    monkeypatch.setattr(Runner, "ours", own)
    monkeypatch.setattr(against_trl, "keep_to", lambda cores: cores)
    monkeypatch.setattr(trl_env, "check", lambda python: None)
    paths = ["--trl-python", "/env/bin/python", "--data", str(tmp_path), "--model", str(tmp_path)]
    assert against_trl.main(["--out", str(tmp_path / "out"), "--rounds", "2", "--steps", "4", *paths]) == code
    assert runs == [
        ("try-one", 1, 0, against_trl.TRIED),
        ("try-two", 2, 0, against_trl.TRIED),
        ("round-1-trl", 2, 1, 4),
        ("round-1-synchronous", SYNCHRONOUS, 1, 4),
        ("round-1-one-step-off-policy", AHEAD, 1, 4),
        ("round-2-trl", 2, 2, 4),
        ("round-2-synchronous", SYNCHRONOUS, 2, 4),
        ("round-2-one-step-off-policy", AHEAD, 2, 4),
    ]
    content = json.loads((tmp_path / "out" / "result.json").read_text())
    assert content["trl_way"] == "two" and content["ratio"][SYNCHRONOUS] == [2.0 / synchronous] * 2
    assert content["cores"] == 2 and bool(content["complaints"]) == bool(code)
