"""An update over chunks as they come, and over the whole iteration: equal metrics, gradients and weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.config import Config
from pipeline.losses import AGG_MODES
from pipeline.models.batch import TrainBatch
from pipeline.models.fsdp import full_state_dict
from pipeline.rows import flat
from pipeline.stats import Stats, reduce
from pipeline.train.learner import Learner
from pipeline.train.setup import build_actor, build_critic
from pipeline.train.update import StreamedUpdate
from tests.train import test_critic
from tests.train.updates import (
    CPU,
    assert_same,
    assert_same_metrics,
    in_chunks,
    make_config,
    masked,
    moved,
    table,
    update,
    with_column,
    with_reference,
    without_advantage,
)

pytestmark = pytest.mark.usefixtures("one_rank")


def referenced(seed: int = 0) -> pa.Table:
    """Rows with log-probs of a reference, some of them without advantage."""
    return with_reference(without_advantage(table(seed), every=3))


def gradients(learner: Learner) -> list[list[Tensor]]:
    """Fills with the gradients of every step."""
    taken: list[list[Tensor]] = []
    step = learner.optimizer_step

    def watched(tokens: float, rejected: float) -> Stats:
        own = [p.grad for p in learner.module.parameters() if p.grad is not None]
        taken.append([(g.full_tensor() if isinstance(g, DTensor) else g).clone() for g in own])
        return step(tokens, rejected)

    learner.optimizer_step = watched  # type: ignore[method-assign]
    return taken


def assert_equal(build: Callable[..., Learner], config: Config, *tables: pa.Table) -> dict[str, float]:
    """Both ways give the same on every one of these iterations; the metrics of the last."""
    learners = [build(config, CPU, 100), build(config, CPU, 100)]
    steps = [gradients(learner) for learner in learners]
    metrics: list[dict[str, float]] = []
    for rows in tables:
        metrics = [reduce([update(learners[0], rows)]), reduce([update(learners[1], *in_chunks(rows))])]
        assert_same_metrics(*metrics)
    assert len(steps[0]) == len(steps[1]) == len(tables) * learners[0].shape.steps
    for whole, early in zip(*steps, strict=True):
        largest = max(float(gradient.abs().max()) for gradient in whole)
        for a, b in zip(whole, early, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5 * largest)
    assert_same(*(full_state_dict(learner.module) for learner in learners), tolerance=1e-4)
    return metrics[1]


OWN_LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coeff": 0.05}


@pytest.mark.parametrize("mode", AGG_MODES)
def test_loss_and_gradient_in_every_aggregation_mode(tiny_model: Path, mode: str) -> None:
    config = make_config(tiny_model, loss_agg_mode=mode, ppo_max_token_len_per_gpu=40, **OWN_LOSS)
    metrics = assert_equal(build_actor, config, referenced(), referenced(1))
    assert metrics["actor/grad_norm"] > 0 and metrics["actor/skipped_steps"] == 0


CASES: dict[str, dict[str, Any]] = {
    "recomputed": {"old_log_probs": "recompute"},
    "sequence ratios": {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean", "old_log_probs": "recompute"},
    # Later mini-batches are trained by the weights that earlier steps have made, with old log-probs from before.
    "mini-batches, recomputed": {"old_log_probs": "recompute", "ppo_mini_batch_size": 4, "ppo_epochs": 2},
    "mini-batches, bypass": {"ppo_mini_batch_size": 2, "ppo_epochs": 2, **OWN_LOSS},
    "weights": {"old_log_probs": "recompute", "correction": {"rollout_is": "token", "rollout_is_threshold": "1.1"}},
    "rejection": {
        "old_log_probs": "recompute",
        "loss_agg_mode": "seq-mean-token-sum",
        "correction": {"rollout_is": "sequence", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.4"},
    },
    "rejection, bypass": {
        "loss_mode": "reinforce",
        "correction": {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.4"},
    },
    "guarded gap": {"max_log_prob_gap": 9.0},
}


def configured(model: Path | str, case: dict[str, Any]) -> Config:
    case = dict(case)
    correction = case.pop("correction", {})
    mode = case.pop("loss_mode", "vanilla")
    gap = case.pop("max_log_prob_gap", None)
    config = make_config(model, **case)
    config.actor.policy_loss.loss_mode = mode
    config.trainer.max_log_prob_gap = gap
    for name, value in correction.items():
        setattr(config.algorithm.rollout_correction, name, value)
    return config


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_kind_of_update(tiny_model: Path, case: dict[str, Any]) -> None:
    metrics = assert_equal(build_actor, configured(tiny_model, case), referenced(), referenced(1))
    if "correction" in case and case.get("old_log_probs") == "recompute":
        assert "rollout_corr/rollout_is_eff_sample_size" in metrics
    if "rollout_rs" in case.get("correction", {}):
        assert 0 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert ("timing_s/old_log_prob" in metrics) == (case.get("old_log_probs") == "recompute")


@pytest.mark.parametrize("changes", [{"loss_agg_mode": "seq-mean-token-sum"}, {"ppo_mini_batch_size": 4}])
def test_the_critic(tiny_model: Path, changes: dict[str, Any]) -> None:
    config = test_critic.make_config(tiny_model, ppo_max_token_len_per_gpu=40, **changes)
    metrics = assert_equal(build_critic, config, test_critic.table(), test_critic.table(1))
    assert metrics["critic/vf_loss"] > 0 and "critic/vf_explained_var" in metrics


def test_an_iteration_with_nothing_to_train_takes_no_step_and_leaves_no_trace(tiny_model: Path) -> None:
    for still in (
        masked(referenced()),
        with_column(referenced(), "advantages", np.zeros(len(flat(table(), "returns")[0]))),
    ):
        metrics = assert_equal(build_actor, make_config(tiny_model), referenced(), still, referenced(1))
        assert metrics["actor/skipped_steps"] == 0
    metrics = assert_equal(build_actor, make_config(tiny_model), masked(referenced()))
    assert metrics["actor/skipped_steps"] == 1


def test_training_begins_with_the_first_chunk_and_steps_as_soon_as_it_may(tiny_model: Path) -> None:
    taken = {}
    for old in ("engine", "recompute"):
        actor = build_actor(make_config(tiny_model, old_log_probs=old, ppo_mini_batch_size=4), CPU, 100)
        before, steps = full_state_dict(actor.module), gradients(actor)
        made = StreamedUpdate(actor, 4)
        taken[old] = []
        for number, chunk in enumerate(in_chunks(table())):
            made.add(TrainBatch.from_table(chunk))
            taken[old].append(len(steps))
            if number == 0:
                assert any(p.grad is not None for p in actor.module.parameters()), "nothing was accumulated"
                assert moved(before, full_state_dict(actor.module)) == 0
        made.finish()
        assert len(made.rows) == 16 and len(steps) == 2
    assert taken == {"engine": [0, 1, 1, 2], "recompute": [0, 0, 0, 0]}


def test_tokens_that_the_actor_rejects_train_the_critic(tiny_model: Path) -> None:
    config = configured(tiny_model, CASES["rejection"])
    config.critic.ppo_mini_batch_size = 4
    rows = with_column(test_critic.table(), "ref_log_probs", flat(table(), "rollout_log_probs")[0])
    metrics = []
    for actors in ([], [build_actor(config, CPU, 100)]):
        critic = test_critic.make_critic(config)
        updates = [StreamedUpdate(learner, 4) for learner in (*actors, critic)]
        for chunk in in_chunks(rows):
            shared = TrainBatch.from_table(chunk)
            for made in updates:
                made.add(shared)
        metrics.append(reduce([made.finish() for made in updates]))
    assert metrics[1]["rollout_corr/rollout_rs_masked_fraction"] > 0
    for name in ("critic/vf_loss", "critic/grad_norm", "critic/vf_explained_var"):
        assert metrics[0][name] == metrics[1][name]


def test_joined_rows_are_those_of_the_whole() -> None:
    whole = TrainBatch.from_table(referenced())
    parts = [TrainBatch.from_table(chunk) for chunk in in_chunks(referenced())]
    for name, value in vars(TrainBatch.concat(parts)).items():
        np.testing.assert_array_equal(value, getattr(whole, name), err_msg=name)


def test_every_pass_is_reported(tiny_model: Path) -> None:
    actor = build_actor(make_config(tiny_model, old_log_probs="recompute", ppo_max_token_len_per_gpu=32), CPU, 100)
    passes: list[str] = []
    actor.on_pass = passes.append
    update(actor, table())
    assert len(passes) > 3 and set(passes) == {"actor"}
