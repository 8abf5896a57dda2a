"""Losses, KL and off-policy correction as the actor applies them: against plain formulas, and however work is split."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.config.algorithm import RolloutCorrectionConfig
from pipeline.models.batch import TrainBatch
from pipeline.models.fsdp import full_state_dict
from pipeline.rows import flat
from pipeline.stats import reduce
from pipeline.train.actor import Actor
from pipeline.train.correction import parse
from pipeline.train.setup import build_actor
from tests.losses import batches
from tests.train import updates
from tests.train.plain import aggregate, gradient_norm, padded, plain_log_probs
from tests.train.updates import (
    CPU,
    assert_same,
    moved,
    table,
    trained,
    update,
    with_column,
    with_reference,
    without_advantage,
)

pytestmark = pytest.mark.usefixtures("one_rank")

LOSSES = batches.NAMES
SEQUENCES = "seq-mean-token-mean"
# Where the bounds are not on the ratio: small enough for the rows' tokens to lie on both sides.
BOUNDS = {
    "dppo_tv": {"clip_ratio_low": 1e-3, "clip_ratio_high": 5e-4, "clip_ratio_c": 1.3},
    "dppo_kl": {"clip_ratio_low": 1e-4, "clip_ratio_high": 1e-4, "clip_ratio_c": 1.3},
}


def make_config(model: Path | str, loss: str, correction: dict[str, Any] | None = None, **changes: Any) -> Config:
    """A run with a loss some of whose tokens reach each of its branches; `changes` are settings of the actor."""
    settings = batches.actor(loss_mode=loss)
    bounds = {name: getattr(settings, name) for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
    options = bounds | BOUNDS.get(loss, {}) | changes
    config = updates.make_config(model, policy_loss=settings.policy_loss, **options)
    config.algorithm.rollout_correction = RolloutCorrectionConfig(**correction or {})
    return config


# against plain formulas


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_are_the_functions_over_the_whole_mini_batch(tiny_model: Path, loss: str) -> None:
    rows = table().to_pylist()
    lm, log_probs, _ = plain_log_probs(tiny_model, rows)
    config = make_config(tiny_model, loss, loss_agg_mode=SEQUENCES, ppo_max_token_len_per_gpu=40)
    packed = TrainBatch.from_table(table())
    keys = iter(packed.random_keys(list(range(len(rows))), config.trainer.seed, 0))
    plain = [
        batches.Row(
            line[: len(row["response_ids"])].detach().numpy(),
            row["rollout_log_probs"],
            row["advantages"],
            row["response_mask"],
            np.array([next(keys) if kept else 0.0 for kept in row["response_mask"]]),
        )
        for line, row in zip(log_probs, rows, strict=True)
    ]
    wanted = batches.evaluate(loss, batches.choose(loss, plain, config.actor), config.actor)
    gradient = torch.zeros_like(log_probs)
    for line, values in zip(gradient, wanted.gradients[SEQUENCES], strict=True):
        line[: len(values)] = torch.from_numpy(values)
    log_probs.backward(gradient)

    metrics, _ = trained(config, table())
    assert metrics["actor/pg_loss"] == pytest.approx(wanted.losses[SEQUENCES], rel=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(gradient_norm(lm), rel=1e-4)
    for name, (total, count) in wanted.sums.items():
        assert metrics[f"actor/{name}"] == pytest.approx(total / count, rel=1e-3), name
        assert name == "ppo_kl" or 0 < total < count, f"{name} says something about these rows"


@pytest.mark.parametrize(("kind", "mode"), [("low_var_kl", "token-mean"), ("kl+", "seq-mean-token-mean")])
def test_kl_to_the_reference_is_added(tiny_model: Path, kind: str, mode: str) -> None:
    rows = with_reference(table()).to_pylist()
    lm, log_probs, _ = plain_log_probs(tiny_model, rows)
    mask, advantages, reference = (padded(rows, name) for name in ("response_mask", "advantages", "ref_log_probs"))
    ratio = (log_probs - padded(rows, "rollout_log_probs")).exp()
    pg_loss = aggregate(torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)), mask, mode, 1.0)
    difference = log_probs - reference
    # With a `+` the number is k1's and the gradient k2's.
    shown = difference if kind == "kl+" else (-difference).exp() - 1 + difference
    derived = difference**2 / 2 if kind == "kl+" else shown
    (pg_loss + 0.3 * aggregate(derived, mask, mode, 1.0)).backward()
    kl = aggregate(shown, mask, mode, 1.0).item()

    changes = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": kind, "loss_agg_mode": mode}
    config = updates.make_config(tiny_model, **changes, clip_ratio_c=1e9, ppo_max_token_len_per_gpu=40)
    metrics, _ = trained(config, with_reference(table()))
    assert metrics["actor/kl_loss"] == pytest.approx(kl, rel=1e-4) and metrics["actor/kl_coef"] == 0.3
    assert metrics["actor/pg_loss"] == pytest.approx(pg_loss.item(), rel=1e-4)
    assert metrics["actor/loss"] == pytest.approx(pg_loss.item() + 0.3 * kl, rel=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(gradient_norm(lm), rel=1e-4)


# correction


def plain_correction(model: Path, level: str | None, cap: float, low: float, high: float) -> tuple[Any, ...]:
    """The model, log-probs, mask and kept tokens (ratio within low and high) [B, T], and weights [B, T]."""
    rows = table().to_pylist()
    lm, log_probs, _ = plain_log_probs(model, rows)
    mask = padded(rows, "response_mask")
    log_ratio = (log_probs.detach() - padded(rows, "rollout_log_probs")) * mask
    keep = mask * (log_ratio.exp() >= low) * (log_ratio.exp() <= high)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    weights = log_ratio.exp().clamp(max=cap) if level else torch.ones_like(log_ratio)
    assert 0.1 < keep.sum() / mask.sum() < 0.9 and (level is None or 0.1 < (weights == cap).float().mean() < 0.9)
    return lm, log_probs, mask, keep, weights


@pytest.mark.parametrize(
    ("old", "level", "mode"),
    [("recompute", level, mode) for level in ("token", "sequence", None) for mode in ("token-mean", SEQUENCES)]
    + [("engine", "token", "token-mean"), ("engine", "sequence", "token-mean")],
)
def test_correction_weighs_and_rejects(tiny_model: Path, old: str, level: str | None, mode: str) -> None:
    """Decoupled mode counts the tokens that are kept; bypass mode, with a loss without a ratio, those of the mask."""
    lm, log_probs, mask, keep, weights = plain_correction(tiny_model, level, 1.1, 0.8, 1.4)
    advantages = padded(table().to_pylist(), "advantages")
    if old == "recompute":
        # The old policy is the current one in the first step: PPO's ratio is 1, and has a gradient.
        ratio = (log_probs - log_probs.detach()).exp()
        loss = aggregate(-advantages * ratio * weights, keep, mode, 1.0)
    else:
        loss = aggregate(-advantages * log_probs * weights * keep, mask, mode, 1.0)
    loss.backward()

    correction = {"rollout_is": level, "rollout_is_threshold": "1.1"}
    correction |= {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.4"}
    changes = {"old_log_probs": old, "loss_agg_mode": mode, "ppo_max_token_len_per_gpu": 40}
    name = "vanilla" if old == "recompute" else "reinforce"
    metrics, _ = trained(make_config(tiny_model, name, correction, **changes), table())
    assert metrics["actor/pg_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(gradient_norm(lm), rel=1e-4)
    lost = 1 - (keep.sum() / mask.sum()).item()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(lost, rel=1e-5)


@pytest.mark.parametrize(("old", "again"), [("engine", True), ("recompute", False)])
def test_weights_of_bypass_mode_follow_the_policy(tiny_model: Path, old: str, again: bool) -> None:
    """Two passes are two updates only where nothing is kept from before the first."""
    correction, changes = {"rollout_is": "token", "rollout_is_threshold": "1.1"}, {"old_log_probs": old}
    _, passes = trained(make_config(tiny_model, "reinforce", correction, ppo_epochs=2, **changes), table())
    _, updates = trained(make_config(tiny_model, "reinforce", correction, **changes), table(), table())
    if again:
        assert_same(passes, updates)
    else:
        assert moved(passes, updates) > 1e-4


@pytest.mark.parametrize(
    ("old", "loss"), [("recompute", "vanilla"), ("recompute", "clip_cov"), ("recompute", "kl_cov"), ("engine", "dro")]
)
def test_rejected_tokens_change_nothing(tiny_model: Path, old: str, loss: str) -> None:
    """Not even as candidates among which the loss chooses, or by the entropy."""
    correction = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.4"}
    *_, mask, keep, _ = plain_correction(tiny_model, None, 1.0, 0.8, 1.4)
    lengths = np.diff(flat(table(), "response_ids")[1])
    rejected = np.concatenate([(m - k).numpy()[:n] for m, k, n in zip(mask, keep, lengths, strict=True)]) > 0
    advantages = flat(table(), "advantages")[0]
    other = with_column(table(), "advantages", np.where(rejected, advantages + 50.0, advantages))
    config = make_config(tiny_model, loss, correction, old_log_probs=old, entropy_coeff=0.05)
    ours, theirs = trained(config, table()), trained(config, other)
    assert ours[0]["actor/grad_norm"] > 0
    assert_same(ours[1], theirs[1], tolerance=0)
    plain = make_config(tiny_model, loss, old_log_probs=old, entropy_coeff=0.05)
    assert moved(trained(plain, table())[1], trained(plain, other)[1]) > 1e-4


@pytest.mark.parametrize(("old", "normalize"), [("recompute", False), ("recompute", True), ("engine", False)])
def test_an_iteration_that_is_rejected_as_a_whole_takes_no_step(tiny_model: Path, old: str, normalize: bool) -> None:
    weights = {"rollout_is": "token", "rollout_is_batch_normalize": normalize} if old == "recompute" else {}
    correction = {**weights, "rollout_rs": "token_k1", "rollout_rs_threshold": "1e6_1e7"}
    for loss, changes in (("vanilla", {}), ("clip_cov", {"entropy_coeff": 0.1}), ("gspo", {"use_kl_loss": True})):
        options = {"old_log_probs": old, "ppo_mini_batch_size": 4, **changes}
        actor = build_actor(make_config(tiny_model, loss, correction, **options), CPU, 100)
        rejecting, actor.correction = actor.correction, parse(RolloutCorrectionConfig())
        update(actor, with_reference(table(seed=1)))  # a step with a gradient of 0 would go on by momentum
        actor.correction = rejecting
        before = full_state_dict(actor.module)
        metrics = reduce([update(actor, with_reference(table()))])
        assert moved(before, full_state_dict(actor.module)) == 0
        assert metrics["actor/skipped_steps"] == 2 and metrics["actor/grad_norm"] == 0
        assert metrics["actor/pg_loss"] == metrics["actor/loss"] == 0
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1
        assert np.isfinite(list(metrics.values())).all()


# rows whose advantages are all 0


def rows_passed(actor: Actor, rows: pa.Table) -> tuple[int, dict[str, float], dict[str, Tensor]]:
    """Rows that go through the update's backward passes, its metrics, and the weights after it."""
    passed, compute_loss = 0, actor.compute_loss

    def count(rows: Any, batch: Any, *args: Any) -> Any:
        nonlocal passed
        passed += batch.sequences * bool((batch.lengths > 1).any())  # without rows there is one of one pad token
        return compute_loss(rows, batch, *args)

    actor.compute_loss = count  # type: ignore[method-assign]
    metrics = reduce([update(actor, rows)])
    return passed, metrics, full_state_dict(actor.module)


@pytest.mark.parametrize("loss", LOSSES)
def test_rows_without_advantage_are_left_out_where_that_changes_nothing(tiny_model: Path, loss: str) -> None:
    config = make_config(tiny_model, loss, ppo_mini_batch_size=4, ppo_epochs=2, loss_agg_mode="seq-mean-token-mean")
    rows = without_advantage(table())
    shortened, whole = build_actor(config, CPU, 100), build_actor(config, CPU, 100)
    whole.skips_without_advantage = False
    ours, theirs = rows_passed(shortened, rows), rows_passed(whole, rows)
    assert theirs[0] == 2 * len(table())
    for name in ("actor/pg_loss", "actor/loss", "actor/grad_norm", "actor/lr", "actor/skipped_steps"):
        assert ours[1][name] == pytest.approx(theirs[1][name], rel=1e-4), name
    assert_same(ours[2], theirs[2])
    if loss in ("dro", "kl_cov"):
        assert ours[0] == theirs[0]
        forced = build_actor(config, CPU, 100)
        forced.skips_without_advantage = True
        assert moved(rows_passed(forced, rows)[2], theirs[2]) > 1e-4, "these rows do pull the policy"
    else:
        assert ours[0] == theirs[0] / 2


@pytest.mark.parametrize("limit", [None, 1e-3])
def test_the_gap_is_measured_without_any_advantage_where_it_is_limited(tiny_model: Path, limit: float | None) -> None:
    config = make_config(tiny_model, "vanilla", ppo_mini_batch_size=4)
    config.trainer.max_log_prob_gap = limit
    metrics, _ = trained(config, without_advantage(table(), every=1))
    assert ("training/rollout_log_probs_diff_max" in metrics) == (limit is not None)


@pytest.mark.parametrize("changes", [{"entropy_coeff": 1.0}, {"use_kl_loss": True, "kl_loss_coef": 1.0}])
def test_rows_without_advantage_stay_for_entropy_and_kl(tiny_model: Path, changes: dict[str, Any]) -> None:
    config, rows = make_config(tiny_model, "vanilla", **changes), with_reference(without_advantage(table()))
    passed, _, weights = rows_passed(build_actor(config, CPU, 100), rows)
    assert passed == len(table())
    forced = build_actor(config, CPU, 100)
    forced.skips_without_advantage = True
    assert moved(rows_passed(forced, rows)[2], weights) > 1e-4


@pytest.mark.parametrize(("loss", "prompts"), [("vanilla", None), ("clip_cov", 4)])
def test_a_mini_batch_without_any_advantage_is_a_step_without_a_gradient(
    tiny_model: Path, loss: str, prompts: int | None
) -> None:
    """Momentum and weight decay act in it, as they do where such rows go through the model."""
    config = make_config(tiny_model, loss, ppo_mini_batch_size=prompts)
    config.actor.optim.weight_decay = 0.5
    shortened, whole = build_actor(config, CPU, 100), build_actor(config, CPU, 100)
    whole.skips_without_advantage = False
    nothing = without_advantage(table(), every=1)
    for rows in (nothing, table(), nothing):
        before = full_state_dict(whole.module)
        ours, theirs = rows_passed(shortened, rows), rows_passed(whole, rows)
        assert moved(before, theirs[2]) > 1e-4
        assert_same(ours[2], theirs[2])
        assert ours[1]["actor/pg_loss"] == pytest.approx(theirs[1]["actor/pg_loss"], rel=1e-5)
        assert ours[1]["actor/skipped_steps"] == 0
    assert ours[0] == 0 and theirs[0] == len(table())
