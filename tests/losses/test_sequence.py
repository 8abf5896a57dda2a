import math

import numpy as np
import pytest
import torch

from pipeline.losses import get_policy_loss
from tests.losses.batches import Row, actor, evaluate, loss_input, random_row

LOW, HIGH = 0.2, 0.3
CONFIG = actor(clip_ratio_low=LOW, clip_ratio_high=HIGH)


def row(log_ratios, advantages, **columns):
    return Row([-2.0 + x for x in log_ratios], [-2.0] * len(log_ratios), advantages, **columns)


def test_gspo_by_hand():
    # Sequence ratios e^0.2 = 1.221 (within) and e^0.5 = 1.649 (above 1.3); masked tokens count in neither.
    rows = [
        row([0.4, 0.0, 9.0], [2.0, 2.0, 2.0], mask=[1, 1, 0]),
        row([0.5], [1.0]),
        row([0.5, 0.5], [-1.0, -1.0]),
        row([-0.6, 0.0], [-1.0, -1.0]),  # e^-0.3 = 0.741, below 0.8
    ]
    got = evaluate("gspo", rows, CONFIG)
    s = math.exp(0.2)
    assert got.per_token.tolist() == pytest.approx([-2 * s, -2 * s, 0, -1.3, math.exp(0.5), math.exp(0.5), 0.8, 0.8])
    assert got.gradient == pytest.approx([-2 * s, -2 * s, 0, 0, math.exp(0.5), math.exp(0.5), 0, 0])
    assert got.sums == {"pg_clipfrac": (3.0, 7), "ppo_kl": (pytest.approx(-1.3), 7)}


def test_gspo_has_the_gradient_of_the_clipped_sequence_objective():
    rng = np.random.default_rng(2)
    rows = [random_row(rng, length) for length in (3, 1, 5, 4, 2)]
    objective, new = 0.0, [torch.tensor(one.log_probs, requires_grad=True) for one in rows]
    for x, one, advantage in zip(new, rows, (1.0, -1.0, 2.0, -0.5, 0.0), strict=True):
        one.advantages[:] = advantage
        s = (x - torch.from_numpy(one.old_log_probs)).mean().exp()
        objective = objective - torch.minimum(s * advantage, s.clamp(1 - LOW, 1 + HIGH) * advantage) / len(rows)
    got = evaluate("gspo", rows, CONFIG)
    assert got.losses["seq-mean-token-mean"] == pytest.approx(objective.item())
    for gradient, expected in zip(
        got.gradients["seq-mean-token-mean"], torch.autograd.grad(objective, new), strict=True
    ):
        np.testing.assert_allclose(gradient, expected, atol=1e-12)


def test_extreme_ratios_of_sequences():
    got = evaluate("gspo", [row([12.0, 12.0], [-1.0, -1.0])], CONFIG)
    assert got.per_token.tolist() == pytest.approx([math.exp(10)] * 2) and got.gradient == [0.0, 0.0]
    # The mean is of unclamped log ratios: with the outlier clamped to -20 the sequence ratio would be 1.
    got = evaluate("gspo", [row([20.0, -22.0], [1.0, 1.0])], CONFIG)
    assert got.per_token[0].item() == pytest.approx(-math.exp(-1.0))
    assert evaluate("geo_mean", [row([900.0], [-1.0])], CONFIG).per_token.item() == pytest.approx(math.exp(20))


def test_gspo_resolves_its_narrow_bounds_in_float32():
    # exp(4e-4) of four tokens with log-probs of -30, whose float32 neighbours are 1.9e-6 apart.
    row = Row([-30.0] * 4, [-30.0, -30.0, -30.0, -30.0 - 1.6e-3], [-1.0] * 4)
    data = loss_input([row], dtype=torch.float32)
    exact = (data.log_probs - data.old_log_probs).double().mean().exp()
    got, _ = get_policy_loss("gspo").function(data, CONFIG)
    assert got.tolist() == pytest.approx([float(exact)] * 4, rel=1.5e-7)


def test_geo_mean_by_hand():
    rows = [
        row([0.1, 0.5, 9.0], [1.0, 1.0, 7.0], mask=[1, 1, 0]),  # 0.5 is held at 0.3: mean 0.2
        row([-0.9, 0.1], [3.0, 3.0]),  # a good sequence that became rarer is not clipped: mean -0.4
        row([-0.9, 0.1], [-1.0, -1.0]),  # a bad one is: mean (-0.2 + 0.1) / 2
        row([0.9], [-2.0]),
        row([], []),
        row([5.0], [5.0], mask=[0]),
    ]
    got = evaluate("geo_mean", rows, CONFIG)
    values = [-math.exp(0.2), -3 * math.exp(-0.4), math.exp(-0.05), 2 * math.exp(0.9)]
    assert got.per_token.tolist() == pytest.approx(
        [values[i] for i in (0, 0)] + [0] + [values[i] for i in (1, 1, 2, 2, 3)] + [0]
    )
    assert got.losses["seq-mean-token-mean"] == pytest.approx(sum(values) / 4)
    gradient = [list(one * 4) for one in got.gradients["seq-mean-token-mean"]]
    assert gradient[0] == pytest.approx([values[0] / 2, 0, 0])
    assert gradient[1] == pytest.approx([values[1] / 2] * 2)
    assert gradient[2] == pytest.approx([0, values[2] / 2])
    assert gradient[3] == pytest.approx([values[3]])
    assert got.sums["pg_clipfrac"] == (1.0, 7) and got.sums["pg_clipfrac_lower"] == (1.0, 7)


def test_geo_mean_clips_by_the_sign_of_the_sequence():
    # Mean advantage 1: both tokens are held at 0.3, also the one whose own advantage is negative.
    got = evaluate("geo_mean", [row([0.9, 0.9], [3.0, -1.0])], CONFIG)
    assert got.per_token.tolist() == pytest.approx([-math.exp(0.3)] * 2)
    assert got.gradient == [0.0, 0.0]
