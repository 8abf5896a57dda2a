"""Nobody reads what stands at tokens of tools and environments: estimates, losses and gradients do not change by a bit
when log-probs, values and advantages there are replaced by noise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from pipeline.advantage.stage import Advantage
from pipeline.config.algorithm import AlgorithmConfig
from pipeline.losses import AGG_MODES
from pipeline.models import packing
from pipeline.rows import ADVANTAGE, SCHEMA, SPANS, flat
from pipeline.stats import reduce
from pipeline.train.learner import Learner
from pipeline.train.setup import build_actor, build_critic
from tests.train import test_actor_losses
from tests.train.test_actor_losses import LOSSES
from tests.train.test_contexts import watch
from tests.train.updates import (
    CPU,
    assert_same,
    assert_same_metrics,
    make_config,
    table,
    trained,
    update,
    with_column,
    with_reference,
)

pytestmark = pytest.mark.usefixtures("one_rank")

READ = ("rollout_log_probs", "ref_log_probs", "values", "sum_pi_squared")
"""Columns of tokens that the advantage stage may read."""


def episodes() -> pa.Table:
    """Scored episodes whose answers and observations are one to three tokens long, with every column of tokens."""
    rng = np.random.default_rng(1)
    rows = with_reference(table(longest=12)).drop_columns(["advantages", "returns"])
    made, masks = [], []
    for length in np.diff(flat(rows, "response_ids")[1]):
        spans: list[dict[str, Any]] = []
        while (left := length - sum(span["tokens"] for span in spans)) > 0:
            kind = (len(spans) + 1) % 2
            reward = float(rng.normal()) if kind else None
            spans.append({"kind": kind, "tokens": min(left, rng.integers(1, 4)), "reward": reward})
        made.append(spans)
        masks += [span["kind"] for span in spans for _ in range(span["tokens"])]
    count = len(masks)
    rows = with_column(rows, "response_mask", np.array(masks))
    rows = with_column(rows, "values", rng.normal(0, 1, count))
    rows = with_column(rows, "sum_pi_squared", rng.uniform(0.1, 0.9, count))
    columns = {
        "split": ["train"] * len(rows),
        "spans": pa.array(made, SPANS),
        "score": [sum(span["reward"] or 0.0 for span in spans) + rng.normal() for spans in made],
        "reward_error": [None] * len(rows),
        "kl_coef": [0.1] * len(rows),
    }
    for name, column in columns.items():
        rows = rows.append_column(SCHEMA.field(name), pa.array(column, SCHEMA.field(name).type))
    return rows


def noisy(rows: pa.Table, names: tuple[str, ...]) -> pa.Table:
    """`rows` with noise, infinities and NaN among it, at the observations of these columns."""
    rng, observed = np.random.default_rng(2), flat(rows, "response_mask")[0] == 0
    for name in names:
        noise = rng.choice([np.nan, np.inf, -np.inf, 1e30, -50.0, 3.0], len(observed))
        rows = with_column(rows, name, np.where(observed, noise, flat(rows, name)[0]))
    return rows


def finished(rows: pa.Table, **algorithm: Any) -> pa.Table:
    return Advantage(AlgorithmConfig(**algorithm), turn_rewards=True)(rows)


@pytest.fixture(scope="module")
def made() -> pa.Table:
    rows = episodes()
    mask = flat(rows, "response_mask")[0]
    assert 0.2 < mask.mean() < 0.8 and max(map(len, rows["spans"].to_pylist())) >= 4
    return rows


CORRECTED = {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.2_5.0"}
BYPASS = CORRECTED | {"rollout_is": "sequence"}


@pytest.mark.parametrize(
    ("algorithm", "actor", "correction"),
    [
        (
            {"adv_estimator": "gae", "use_kl_in_reward": True, "lam": 0.9, "turn_gamma": 0.9},
            {"old_log_probs": "recompute", "entropy_coeff": 0.05, "use_kl_loss": True, "ppo_epochs": 2},
            CORRECTED,
        ),
        (
            {"adv_estimator": "turn_grpo"},
            {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean", "ppo_mini_batch_size": 4},
            {},
        ),
        (
            {"adv_estimator": "tir_optimal_token_baseline"},
            {"loss_mode": "clip_cov", "loss_agg_mode": "seq-mean-token-sum-norm"},
            {},
        ),
        (
            {"adv_estimator": "remax"},
            {"loss_mode": "reinforce", "ppo_epochs": 2},
            CORRECTED | {"rollout_is": "sequence"},
        ),
    ],
    ids=["ppo", "turn_grpo-gspo", "tir_otb-clip_cov", "remax-bypass"],
)
def test_noise_changes_neither_advantages_nor_weights(
    tiny_model: Path, made: pa.Table, algorithm: dict[str, Any], actor: dict[str, Any], correction: dict[str, Any]
) -> None:
    baseline = pa.array(np.linspace(-1, 1, len(made)), pa.float32())
    rows = made.append_column(SCHEMA.field("baseline"), baseline)
    clean, spoilt = finished(rows, **algorithm), finished(noisy(rows, READ), **algorithm)
    assert all(clean[name] == spoilt[name] for name in ADVANTAGE.names)
    assert clean["advantages"] != finished(with_other_scores(rows), **algorithm)["advantages"]

    config = make_config(tiny_model, **{name: value for name, value in actor.items() if name != "loss_mode"})
    config.actor.policy_loss.loss_mode = actor.get("loss_mode", "vanilla")
    for name, value in correction.items():
        setattr(config.algorithm.rollout_correction, name, value)
    metrics, weights = trained(config, clean, build=build_actor)
    others, changed = trained(config, noisy(spoilt, ("advantages", "returns")), build=build_actor)
    assert all(torch.equal(weight, changed[name]) for name, weight in weights.items())
    assert {name: value for name, value in metrics.items() if not name.startswith("timing_s/")} == {
        name: value for name, value in others.items() if not name.startswith("timing_s/")
    }
    assert metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize("build", [build_actor, build_critic])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_nothing_is_computed_at_observations(
    tiny_model: Path, made: pa.Table, monkeypatch: pytest.MonkeyPatch, build: Callable, mode: str
) -> None:
    """Predictions there change neither the metrics nor the weights, and are left out."""
    rows, counts = finished(made, adv_estimator="gae"), list[int]()
    config = make_config(tiny_model, loss_agg_mode=mode, old_log_probs="recompute", entropy_coeff=0.05)
    config.critic.enable = True

    def everywhere(*args: Any) -> Any:
        # As `pack` without the tokens that are read: all of the response.
        return whole(*args[:3], packed=args[4])

    whole = packing.pack
    results = []
    for pack in (everywhere, whole):
        counts.append(0)
        monkeypatch.setattr(packing, "pack", lambda *args, pack=pack: count(counts, pack(*args)))
        results.append(trained(config, rows, build=build))
    (metrics, weights), (others, changed) = results
    mask = flat(rows, "response_mask")[0]
    assert counts == [len(mask), (mask > 0).sum()]
    assert_same(weights, changed)
    assert_same_metrics(metrics, others)


def count(counts: list[int], inputs: packing.ModelInputs) -> packing.ModelInputs:
    """`inputs`, whose predictions are added to the last of `counts`."""
    counts[-1] += len(inputs.targets)
    return inputs


def with_other_scores(rows: pa.Table) -> pa.Table:
    """`rows` with another score: the comparison of advantages compares something."""
    column = rows.column_names.index("score")
    scores = np.random.default_rng(5).normal(size=len(rows))
    return rows.set_column(column, SCHEMA.field("score"), pa.array(scores, pa.float32()))


def loss_and_gradient(learner: Learner, rows: pa.Table, loss: str) -> tuple[float, dict[str, Tensor]]:
    gradient = watch(learner)
    return reduce([update(learner, rows)])[loss], gradient


@pytest.mark.parametrize("loss", [*LOSSES, "critic"])
def test_noise_reaches_no_loss_and_no_gradient_in_any_aggregation(tiny_model: Path, made: pa.Table, loss: str) -> None:
    def computed(rows: pa.Table, mode: str) -> tuple[float, dict[str, Tensor]]:
        if loss == "critic":
            config = make_config(tiny_model)
            config.critic.enable, config.critic.loss_agg_mode = True, mode
            return loss_and_gradient(build_critic(config, CPU, 100), rows, "critic/vf_loss")
        options = {"loss_agg_mode": mode, "use_kl_loss": True, "entropy_coeff": 0.05}
        config = test_actor_losses.make_config(tiny_model, loss, **options)
        return loss_and_gradient(build_actor(config, CPU, 100), rows, "actor/pg_loss")

    clean = finished(made, adv_estimator="gae")
    spoilt = noisy(clean, (*READ, "advantages", "returns"))
    for mode in AGG_MODES:
        (number, gradient), (same, equal) = computed(clean, mode), computed(spoilt, mode)
        assert np.isfinite(number) and number == same, mode
        assert all(torch.equal(grad, equal[name]) for name, grad in gradient.items()), mode
    # Numbers of answers do reach them.
    read = "returns" if loss == "critic" else "advantages"
    _, other = computed(with_column(clean, read, 2 * flat(clean, read)[0]), mode)
    assert not all(torch.equal(grad, other[name]) for name, grad in gradient.items())


def test_noise_does_not_reach_the_critic(tiny_model: Path, made: pa.Table) -> None:
    clean, spoilt = (finished(rows, adv_estimator="gae") for rows in (made, noisy(made, READ)))
    config = make_config(tiny_model)
    config.critic.enable = True
    metrics, weights = trained(config, clean, build=build_critic)
    _, changed = trained(config, noisy(spoilt, ("advantages", "returns")), build=build_critic)
    assert all(torch.equal(weight, changed[name]) for name, weight in weights.items())
    assert metrics["critic/grad_norm"] > 0
