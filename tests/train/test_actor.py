"""The actor's update against a formula written out on padded tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from pipeline.losses import AGG_MODES
from pipeline.models.batch import TrainBatch
from pipeline.models.fsdp import full_state_dict
from pipeline.rows import flat
from pipeline.stats import reduce
from pipeline.train.setup import build_actor
from pipeline.train.update import StreamedUpdate
from tests.train.plain import aggregate, gradient_norm, padded, plain_log_probs
from tests.train.updates import (
    CPU,
    assert_same,
    assert_same_metrics,
    in_chunks,
    make_config,
    masked,
    moved,
    table,
    trained,
    update,
    with_column,
    with_contexts,
    without_advantage,
)

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def initial(tiny_model: Path, one_rank: None) -> dict[str, Tensor]:
    return full_state_dict(build_actor(make_config(tiny_model), CPU, 1).module)


# against plain formulas


@pytest.mark.parametrize("mode", AGG_MODES)
def test_loss_and_gradient_are_those_of_the_written_out_formula(tiny_model: Path, mode: str) -> None:
    rows = table().to_pylist()
    lm, log_probs, entropy = plain_log_probs(tiny_model, rows)
    mask, advantages = padded(rows, "response_mask"), padded(rows, "advantages")
    ratio = (log_probs - padded(rows, "rollout_log_probs")).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.9, 1.3))
    loss = torch.where(advantages < 0, torch.minimum(loss, -1.5 * advantages), loss)
    divisor = 12.0 if mode != "token-sum" else 1.0
    pg_loss = aggregate(loss, mask, mode, divisor)
    total = pg_loss - 0.05 * aggregate(entropy, mask, mode, divisor)
    total.backward()

    changes = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5, "entropy_coeff": 0.05}
    metrics, _ = trained(make_config(tiny_model, loss_agg_mode=mode, ppo_max_token_len_per_gpu=40, **changes), table())
    assert metrics["actor/pg_loss"] == pytest.approx(pg_loss.item(), rel=1e-4, abs=1e-6)
    assert metrics["actor/loss"] == pytest.approx(total.item(), rel=1e-4, abs=1e-6)
    assert metrics["actor/grad_norm"] == pytest.approx(gradient_norm(lm), rel=1e-4)
    assert metrics["actor/entropy"] == pytest.approx(aggregate(entropy, mask, "token-mean", 1.0).item(), rel=1e-5)
    gap = ((log_probs - padded(rows, "rollout_log_probs")).abs() * mask).max()
    assert metrics["training/rollout_log_probs_diff_max"] == pytest.approx(gap.item(), rel=1e-4)
    assert 0 < metrics["actor/pg_clipfrac"] < 1 and 0 < metrics["actor/pg_clipfrac_lower"] < 1


def test_the_update_follows_the_gradient(tiny_model: Path, initial: dict[str, Tensor]) -> None:
    rows = table()
    before, after = trained(make_config(tiny_model), rows)
    again, _ = trained(make_config(tiny_model), rows, rows)
    assert again["actor/pg_loss"] < before["actor/pg_loss"]
    assert moved(initial, after) > 1e-4
    frozen = make_config(tiny_model)
    frozen.actor.optim.lr = 0.0
    assert moved(initial, trained(frozen, rows)[1]) == 0


def test_the_temperature_is_the_samplers(tiny_model: Path) -> None:
    rows = table().to_pylist()
    with torch.no_grad():
        _, log_probs, _ = plain_log_probs(tiny_model, rows, temperature=0.7)
    exact = [line[: len(row["response_ids"])].numpy() for line, row in zip(log_probs, rows, strict=True)]
    made = with_column(table(), "rollout_log_probs", np.concatenate(exact))
    gaps = {}
    for temperature in (0.7, 1.0):
        for source in ("engine", "recompute"):
            config = make_config(tiny_model, old_log_probs=source)
            config.rollout.temperature = temperature
            gaps[temperature, source] = trained(config, made)[0]["training/rollout_log_probs_diff_max"]
    assert gaps[0.7, "engine"] < 1e-4 and gaps[0.7, "recompute"] < 1e-4
    assert gaps[1.0, "engine"] > 1e-2 and gaps[1.0, "recompute"] > 1e-2


# where old log-probs come from


def test_engine_and_recomputed_log_probs_agree_when_the_engine_is_exact(tiny_model: Path) -> None:
    options = {"ppo_epochs": 2, "ppo_mini_batch_size": 4}
    actor = build_actor(make_config(tiny_model, old_log_probs="recompute", **options), CPU, 1)
    rows = TrainBatch.from_table(table())
    actor.compute_old_log_probs(rows)
    exact = with_column(table(), "rollout_log_probs", rows.old_log_probs)
    _, by_engine = trained(make_config(tiny_model, old_log_probs="engine", **options), exact)
    metrics, by_trainer = trained(make_config(tiny_model, old_log_probs="recompute", **options), exact)
    assert_same(by_engine, by_trainer)
    assert metrics["training/rollout_log_probs_diff_max"] < 1e-5
    assert metrics["timing_s/old_log_prob"] > 0

    # An inexact engine makes a difference to `engine` and none to `recompute`.
    assert_same(trained(make_config(tiny_model, old_log_probs="recompute", **options), table())[1], by_trainer)
    assert moved(trained(make_config(tiny_model, old_log_probs="engine", **options), table())[1], by_engine) > 1e-4


def test_recomputed_log_probs_stay_those_of_before_the_update(tiny_model: Path) -> None:
    metrics, _ = trained(make_config(tiny_model, old_log_probs="recompute"), table())
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)  # one step: the policy has not moved yet
    metrics, _ = trained(make_config(tiny_model, old_log_probs="recompute", ppo_epochs=3), table())
    assert abs(metrics["actor/ppo_kl"]) > 1e-5


@pytest.mark.parametrize("changes", [{}, {"loss_mode": "gspo"}, {"entropy_coeff": 0.05}], ids=str)
@pytest.mark.parametrize("parts", [1, 4])
def test_the_pass_of_an_only_step_computes_the_old_log_probs_too(
    tiny_model: Path, changes: dict[str, Any], parts: int
) -> None:
    """Weights, metrics and recorded log-probs are the same, and no row passes twice before the step."""
    rows = without_advantage(table())
    results, passed = [], []
    for in_one_pass in (True, False):
        settings = dict(changes)
        loss = settings.pop("loss_mode", "vanilla")
        config = make_config(tiny_model, old_log_probs="recompute", **settings)
        config.actor.policy_loss.loss_mode = loss
        actor = build_actor(config, CPU, 1)
        assert actor.in_one_pass
        actor.in_one_pass = in_one_pass
        tokens: list[int] = []
        forward = actor._pass
        actor._pass = lambda batch, *more, f=forward, t=tokens, **named: (  # type: ignore[method-assign]
            t.append(len(batch.targets)) or f(batch, *more, **named)
        )
        made = StreamedUpdate(actor, parts)
        for part in [rows] if parts == 1 else in_chunks(rows):
            made.add(TrainBatch.from_table(part))
        metrics = reduce([made.finish()])
        results.append((full_state_dict(actor.module), metrics, made.rows.old_log_probs))
        passed.append(sum(tokens))
    (weights, metrics, log_probs), (weights_2, metrics_2, log_probs_2) = results
    assert_same(weights, weights_2)
    assert_same_metrics(metrics, metrics_2)
    np.testing.assert_allclose(log_probs, log_probs_2, atol=1e-5)
    assert metrics["actor/ppo_kl"] == 0.0
    count = int(TrainBatch.from_table(rows).mask.sum())
    assert passed[0] == count < passed[1]


@pytest.mark.parametrize(
    "changes",
    [{"ppo_epochs": 2}, {"ppo_mini_batch_size": 4}, {"old_log_probs": "engine"}, {"loss_mode": "clip_cov"}, {"tis": 1}],
    ids=str,
)
def test_old_log_probs_have_a_pass_of_their_own_if_they_are_needed_earlier(
    tiny_model: Path, changes: dict[str, Any]
) -> None:
    loss, tis = changes.pop("loss_mode", "vanilla"), changes.pop("tis", 0)
    config = make_config(tiny_model, **{"old_log_probs": "recompute", **changes})
    config.actor.policy_loss.loss_mode = loss
    if tis:
        config.algorithm.rollout_correction.rollout_is = "token"
    assert not build_actor(config, CPU, 1).in_one_pass


def test_the_gap_is_measured_at_the_places_of_the_response(tiny_model: Path) -> None:
    """A response of several contexts counts from the beginning of each, in any micro-batches."""
    rows = with_contexts(table(longest=40))
    found = []
    for budget in (60, 4096):
        config = make_config(tiny_model, ppo_max_token_len_per_gpu=budget)
        actor = build_actor(config, CPU, 1)
        batch = TrainBatch.from_table(rows)
        metrics = reduce([update(actor, batch)])
        found.append({name: metrics[name] for name in metrics if "/from_" in name})
    assert len(found[0]) == 2
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    own = build_actor(make_config(tiny_model, old_log_probs="recompute", ppo_epochs=2), CPU, 1)
    own.compute_old_log_probs(batch)
    gap, kept = np.abs(batch.old_log_probs - batch.rollout_log_probs), batch.mask > 0
    places = np.concatenate([np.arange(count) for count in np.diff(batch.response_offsets)])
    for first, inside in ((0, places < 16), (16, places >= 16)):
        expected = gap[kept & inside].mean()
        assert found[0][f"training/rollout_log_probs_diff/from_{first}"] == pytest.approx(expected, rel=1e-4)


# batches and steps


def test_a_mini_batch_is_a_step_of_its_own(tiny_model: Path) -> None:
    _, split = trained(make_config(tiny_model, ppo_mini_batch_size=4), table())
    half = make_config(tiny_model)
    half.data.train_batch_size = 4
    _, one_by_one = trained(half, table().slice(0, 8), table().slice(8))
    assert_same(split, one_by_one)
    assert moved(split, trained(make_config(tiny_model), table())[1]) > 1e-4


@pytest.mark.parametrize(("epochs", "mini_batch", "steps"), [(1, None, 1), (3, None, 3), (1, 2, 4), (2, 4, 4)])
def test_number_of_optimiser_steps(tiny_model: Path, epochs: int, mini_batch: int | None, steps: int) -> None:
    config = make_config(tiny_model, ppo_epochs=epochs, ppo_mini_batch_size=mini_batch)
    config.actor.optim.lr_warmup_steps = 100
    actor = build_actor(config, CPU, iterations=1000)
    metrics = reduce([update(actor, table())])
    assert {int(state["step"]) for state in actor.optimizer.state.values()} == {steps}
    assert actor.scheduler.last_epoch == steps
    assert metrics["actor/lr"] == pytest.approx(1e-2 * steps / 100)
    assert metrics["actor/skipped_steps"] == 0


def test_losses_are_shown_as_the_mean_over_the_steps(tiny_model: Path) -> None:
    shown = []
    for epochs, mini_batch in ((1, None), (3, None), (2, 4)):
        # Without movement every pass has the same loss.
        config = make_config(
            tiny_model,
            ppo_epochs=epochs,
            ppo_mini_batch_size=mini_batch,
            loss_agg_mode="token-sum",
            entropy_coeff=0.1,
            use_kl_loss=True,
        )
        config.actor.optim.lr = 0.0
        reference = np.full(len(flat(table(), "response_ids")[0]), -5.0)
        metrics, _ = trained(config, with_column(table(), "ref_log_probs", reference))
        shown.append([metrics[f"actor/{name}"] for name in ("pg_loss", "loss", "kl_loss")])
    assert shown[1] == pytest.approx(shown[0], rel=1e-5)
    assert shown[2] == pytest.approx([value / 2 for value in shown[0]], rel=1e-5)  # two halves of one sum


# steps that are not taken


def test_rows_without_a_token_to_train_on_take_no_step(tiny_model: Path, initial: dict[str, Tensor]) -> None:
    metrics, after = trained(make_config(tiny_model, entropy_coeff=0.1), masked(table()))
    assert moved(initial, after) == 0  # not even by weight decay
    assert metrics["actor/skipped_steps"] == 1 and metrics["actor/grad_norm"] == 0
    assert metrics["actor/pg_loss"] == 0 and "actor/entropy" not in metrics

    # One empty mini-batch of two skips one step, the first one's momentum notwithstanding.
    half = table().slice(0, 8)
    mixed = pa.concat_tables([half, masked(table().slice(8))])
    metrics, after = trained(make_config(tiny_model, ppo_mini_batch_size=4), mixed)
    assert metrics["actor/skipped_steps"] == 1
    alone = make_config(tiny_model)
    alone.data.train_batch_size = 4
    assert_same(after, trained(alone, half)[1])


def test_a_gradient_that_is_not_finite_takes_no_step(tiny_model: Path, initial: dict[str, Tensor]) -> None:
    actor = build_actor(make_config(tiny_model, ppo_epochs=2), CPU, 100)
    broken = TrainBatch.from_table(table())
    broken.advantages[:] = 1e37
    metrics = reduce([update(actor, broken)])
    assert metrics["actor/skipped_steps"] == 2 and "actor/grad_norm" not in metrics
    assert moved(initial, full_state_dict(actor.module)) == 0
    assert actor.scheduler.last_epoch == 0
    # The next iteration finds no trace of it.
    metrics = reduce([update(actor, table())])
    assert metrics["actor/skipped_steps"] == 0
    assert_same(full_state_dict(actor.module), trained(make_config(tiny_model, ppo_epochs=2), table())[1])


def test_gradients_that_stay_broken_end_the_run(tiny_model: Path) -> None:
    config = make_config(tiny_model, ppo_epochs=2)
    config.trainer.max_nonfinite_steps = 3
    actor = build_actor(config, CPU, 100)
    good, broken = TrainBatch.from_table(table()), TrainBatch.from_table(table())
    broken.advantages[:] = 1e37
    for rows in (broken, good, broken):
        update(actor, rows)
    with pytest.raises(FloatingPointError, match=r"actor was \w+ in 4 .* in a row, more than .*max_nonfinite_steps=3"):
        update(actor, broken)
