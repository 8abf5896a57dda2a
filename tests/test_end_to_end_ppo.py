"""Critic, reference and KL of the session's PPO run, whose first iteration trains the critic alone.

The long tests run what it leaves out: greedy baselines (ReMax), and the optimal token baseline with GSPO's loss.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.models.policy import Policy
from pipeline.models.value import ValueModel
from pipeline.rows import flat
from pipeline.track.trajectories import read_trajectories
from tests.runs import (
    BATCH,
    COEF,
    HORIZON,
    LOSS_COEF,
    REWARD,
    SAMPLES,
    TARGET_KL,
    Run,
    Start,
    Training,
    score,
    starter,
    tiny_settings,
)
from tests.scoring.generated import assert_near
from tests.scoring.test_policy import sums
from tests.scoring.test_reference import chosen
from tests.scoring.test_value import expected as values_of

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

GSPO = (
    *("actor.policy_loss.loss_mode=gspo", "actor.clip_ratio_low=3e-4", "actor.clip_ratio_high=4e-4"),
    "actor.loss_agg_mode=seq-mean-token-mean",
)


def rows_of(run: Run, iteration: int) -> pa.Table:
    return read_trajectories(str(run.folder), iteration)


def saved(folder: Path, version: int, name: str, module: Any) -> Any:
    """`module` with the weights of a checkpoint."""
    state = module.state_dict()
    dcp.load({name: {"model": state}}, checkpoint_id=folder / "checkpoints" / f"iteration_{version:06d}")
    module.load_state_dict(state)
    return module


def test_the_warm_up_leaves_the_policy_as_it_is(training: Training, tiny_model: Path) -> None:
    initial = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert [score(initial, rows_of(training.continued, iteration)) < 1e-4 for iteration in (1, 2, 3)] == [1, 1, 0]
    assert ["actor/grad_norm" in training.continued.records[iteration] for iteration in (1, 2, 3)] == [0, 1, 1]


def test_the_critic_moves_and_goes_on_from_the_checkpoint(training: Training, tiny_model: Path) -> None:
    run, last = training.continued, training.last
    assert set(flat(rows_of(run, 1), "values")[0]) == {0.0}
    for iteration in range(1, last + 2):
        rows = rows_of(run, iteration)
        assert set(rows["value_version"].to_pylist()) == {iteration - 1}
        assert iteration == 1 or np.abs(flat(rows, "values")[0]).max() > 1e-2
    # The last rows belong to the continued run: their values come from what was restored.
    critic = ValueModel(AutoModelForCausalLM.from_pretrained(tiny_model))
    assert_near(rows["values"], values_of(saved(training.before, last, "critic", critic), rows), 1e-4)


def test_the_reference_stays_the_model_before_training(training: Training, tiny_model: Path) -> None:
    for iteration in (1, 2, training.last + 1):
        rows = rows_of(training.continued, iteration)
        gap = np.abs(flat(rows, "ref_log_probs")[0] - flat(rows, "rollout_log_probs")[0]).max()
        assert gap < 1e-4 if iteration < 3 else gap > 1e-2
        assert_near(rows["ref_log_probs"], chosen(tiny_model, rows, 1.0))


def test_the_coefficient_follows_the_kl_and_goes_on_from_the_checkpoint(training: Training) -> None:
    run, coef = training.continued, COEF
    for iteration in range(1, training.last + 2):
        rows = rows_of(run, iteration)
        (carried,) = set(rows["kl_coef"].to_pylist())
        assert carried == pytest.approx(coef, rel=1e-6)
        assert run.records[iteration]["actor/reward_kl_penalty_coeff"] == pytest.approx(coef, rel=1e-6)
        kl = rows["kl"].to_numpy().mean()
        assert run.records[iteration]["actor/reward_kl_penalty"] == pytest.approx(kl, rel=1e-4, abs=1e-6)
        # Far below or far above the target, where the step is bounded: the policy moves in the second iteration.
        assert abs(kl / TARGET_KL - 1) > 0.2 and (kl > TARGET_KL) == (iteration > 2)
        coef *= 1 + math.copysign(0.2, kl - TARGET_KL) * BATCH * SAMPLES / HORIZON
    progress = run.folder / "checkpoints" / f"iteration_{training.last + 1:06d}" / "progress.json"
    assert json.loads(progress.read_text())["kl_coef"] == pytest.approx(coef, rel=1e-6)


def test_rewards_pay_the_kl(training: Training) -> None:
    rows = rows_of(training.continued, training.last + 1).to_pylist()
    for row in rows:
        kl = np.array(row["rollout_log_probs"]) - row["ref_log_probs"]
        assert row["reward"] == pytest.approx(row["score"] - row["kl_coef"] * kl.sum(), rel=1e-4, abs=1e-5)
    assert max(abs(row["reward"] - row["score"]) for row in rows) > 1e-3


def test_metrics_of_critic_and_kl(training: Training) -> None:
    for iteration in range(1, training.last + 2):
        record = training.continued.records[iteration]
        for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "values/mean", "returns/mean", "rewards/mean"):
            assert math.isfinite(record[f"critic/{name}"]), name
        assert record["critic/grad_norm"] > 0 and record["critic/skipped_steps"] == 0
        assert record["critic/lr"] == 1e-2 and record["timing_s/update_critic"] > 0
        assert record["training/value_staleness/max"] == 0
        values, returns = (flat(rows_of(training.continued, iteration), name)[0] for name in ("values", "returns"))
        explained = 1 - (returns - values).var() / returns.var()
        assert record["critic/vf_explained_var"] == pytest.approx(explained, rel=1e-4, abs=1e-5)
        assert record["critic/values/mean"] == pytest.approx(values.mean(), rel=1e-4, abs=1e-6)
        assert ("actor/kl_loss" in record) == (iteration > 1)
        if iteration > 1:
            assert math.isfinite(record["actor/kl_loss"]) and record["actor/kl_loss"] > 1e-5
            loss = record["actor/pg_loss"] + LOSS_COEF * record["actor/kl_loss"]
            assert record["actor/loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, prompt_files: Any, ray_session: None) -> Start:
    quiet = ("trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=1")
    settings = tiny_settings(tmp_path_factory.mktemp("baselines"), tiny_model, prompt_files)
    return starter([*settings, *quiet, "trainer.max_ckpt_to_keep=3"])


@pytest.fixture(scope="module")
def remax(start: Start) -> Run:
    return start("remax", "algorithm=remax", "rollout.n=1", "trainer.total_training_steps=1")


@pytest.fixture(scope="module")
def otb(start: Start) -> Run:
    return start("otb", "algorithm=otb", *GSPO, "trainer.total_training_steps=2")


@torch.no_grad()
def greedy_score(model: Any, tokenizer: Any, row: dict[str, Any]) -> float:
    rule: dict[str, Any] = {}
    exec(REWARD, rule)
    prompt = torch.tensor([row["prompt_ids"]])
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12)
    text = tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)
    return rule["compute_score"]("countdown", text, None, json.loads(row["extra_info"]))["score"]


@pytest.mark.long
def test_remax_compares_each_response_with_the_greedy_one(remax: Run, tiny_model: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    rows = rows_of(remax, 1)
    assert rows["split"].to_pylist() == ["train"] * BATCH and rows["sample"].to_pylist() == [0] * BATCH
    for row in rows.to_pylist():
        assert row["baseline"] == pytest.approx(greedy_score(model, tokenizer, row))
        want = [row["score"] - row["baseline"]] * len(row["response_ids"])
        # What is left of the KL between equal policies.
        assert row["advantages"] == pytest.approx(want, abs=1e-5)
    record = remax.records[1]
    assert record["critic/baseline/mean"] == pytest.approx(rows["baseline"].to_numpy().mean())
    assert len(set(rows["baseline"].to_pylist())) > 1 and record["actor/grad_norm"] > 1e-3


@pytest.mark.long
def test_sums_follow_the_policy(otb: Run, tiny_model: Path, tmp_path: Path) -> None:
    policy = saved(otb.folder, 1, "actor", Policy(AutoModelForCausalLM.from_pretrained(tiny_model)))
    policy.lm.save_pretrained(tmp_path)
    for iteration, folder in ((1, tiny_model), (2, tmp_path)):
        rows = rows_of(otb, iteration)
        assert set(rows["pi_version"].to_pylist()) == {iteration - 1}
        # The tiny policy is nearly uniform: its sums are small, and so is what a step changes.
        assert_near(rows["sum_pi_squared"], sums(folder, rows), 1e-6)
        assert otb.records[iteration]["training/pi_staleness/max"] == 0
    before = torch.cat(sums(tiny_model, rows_of(otb, 2)))
    assert (before - torch.tensor(flat(rows_of(otb, 2), "sum_pi_squared")[0])).abs().max() > 1e-5


@pytest.mark.long
def test_optimal_token_baselines(otb: Run) -> None:
    """At each place the advantages sum to 0, weighted by the squared gradient that has built up to there."""
    for iteration in (1, 2):
        totals: dict[tuple[str, int], list[np.ndarray]] = {}
        for row in rows_of(otb, iteration).to_pylist():
            weights = np.cumsum(1 - 2 * np.exp(row["rollout_log_probs"]) + row["sum_pi_squared"])
            for place, (weight, advantage) in enumerate(zip(weights, row["advantages"], strict=True)):
                totals.setdefault((row["uid"], place), []).append(np.array([weight * advantage, abs(advantage)]))
        shared = [np.sum(terms, axis=0) for terms in totals.values() if len(terms) > 1]
        assert max(abs(weighted) for weighted, _ in shared) < 1e-4 < 0.1 < max(size for _, size in shared)


@pytest.mark.long
def test_gspo_trains_on_them(otb: Run) -> None:
    for iteration in (1, 2):
        record = otb.records[iteration]
        rows = rows_of(otb, iteration)["advantages"].to_pylist()
        # Before the only step of the iteration all ratios are 1.
        assert record["actor/pg_loss"] == pytest.approx(-np.mean([np.mean(row) for row in rows]), rel=1e-3, abs=1e-5)
        assert record["actor/grad_norm"] > 1e-3 and record["actor/skipped_steps"] == 0
        assert record["training/rollout_log_probs_diff_max"] < 1e-4
