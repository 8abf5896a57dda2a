import math

import pytest
import torch

from pipeline.losses import get_policy_loss
from tests.losses.batches import Row, actor, evaluate, loss_input, ratios

CONFIG = actor(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0)


def one(name, row):
    """Loss, gradient and metrics of a single token."""
    got = evaluate(name, [row], CONFIG)
    assert all(count == 1 for _, count in got.sums.values())
    return got.per_token.item(), got.gradient[0], {name: total for name, (total, _) in got.sums.items()}


def probabilities(advantage, old, new):
    return Row([math.log(new)], [math.log(old)], [advantage])


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient", "clipped", "dual"),
    [
        (2.0, 1.0, -2.0, -2.0, 0, 0),  # on-policy: the plain policy gradient
        (2.0, 1.2, -2.4, -2.4, 0, 0),
        (2.0, 1.5, -2.6, 0.0, 1, 0),  # above 1 + high: held at 2 * 1.3
        (2.0, 0.5, -1.0, -1.0, 0, 0),  # a good token became rarer: not clipped
        (-2.0, 0.9, 1.8, 1.8, 0, 0),
        (-2.0, 0.5, 1.6, 0.0, 1, 0),  # below 1 - low: held at 2 * 0.8
        (-2.0, 2.5, 5.0, 5.0, 0, 0),  # a bad token became likelier: full force up to c
        (-2.0, 4.0, 6.0, 0.0, 0, 1),  # dual clip: held at 2 * 3
        (0.0, 4.0, 0.0, 0.0, 0, 0),
    ],
)
def test_vanilla_in_each_branch_of_the_clip(advantage, ratio, loss, gradient, clipped, dual):
    got_loss, got_gradient, sums = one("vanilla", ratios([advantage], [ratio]))
    assert got_loss == pytest.approx(loss)
    assert got_gradient == pytest.approx(gradient)
    assert sums == {"pg_clipfrac": clipped, "pg_clipfrac_lower": dual, "ppo_kl": pytest.approx(-math.log(ratio))}


@pytest.mark.parametrize(
    ("advantage", "ratio", "weight", "clipped"),
    [(2.0, 1.1, 1.1, 0), (2.0, 1.5, 1.3, 1), (-2.0, 0.5, 0.8, 1), (2.0, 0.5, 0.8, 1), (-2.0, 4.0, 1.3, 1)],
)
def test_cispo_keeps_every_gradient_and_bounds_its_weight(advantage, ratio, weight, clipped):
    row = ratios([advantage], [ratio], old_log_prob=-3.0)
    loss, gradient, sums = one("cispo", row)
    assert gradient == pytest.approx(-advantage * weight)
    assert loss == pytest.approx(-advantage * weight * (-3.0 + math.log(ratio)))
    assert sums == {"pg_clipfrac": clipped, "ppo_kl": pytest.approx(-math.log(ratio))}


@pytest.mark.parametrize(
    ("advantage", "old", "new", "weight", "truncated"),
    [
        (2.0, 0.5, 0.7, 1.4, 0),
        (2.0, 0.5, 0.85, None, 0),  # 0.35 above the old probability, and the update goes on
        (2.0, 0.5, 0.1, 0.2, 0),  # far below, but the update leads back
        (-1.0, 0.5, 0.25, None, 0),  # 0.25 below, where 0.2 is allowed
        (2.0, 0.001, 0.0025, 2.5, 0),  # a ratio that PPO would clip, for a difference that is none
        (-1.0, 0.01, 0.05, 3.0, 1),  # r = 5, truncated at c
    ],
)
def test_dppo_tv_trusts_differences_of_probabilities(advantage, old, new, weight, truncated):
    loss, gradient, sums = one("dppo_tv", probabilities(advantage, old, new))
    assert gradient == pytest.approx(-advantage * (weight or 0.0))
    assert loss == pytest.approx(-advantage * (weight or 0.0) * math.log(new))
    assert (sums["pg_clipfrac"], sums["pg_clipfrac_lower"]) == (weight is None, truncated)


@pytest.mark.parametrize(
    ("advantage", "old", "new", "weight"),
    [
        (2.0, 0.5, 0.8, 1.6),  # KL = ln(0.5 / 0.8) / 2 + ln(0.5 / 0.2) / 2 = 0.223 nats, 0.3 allowed
        (-2.0, 0.5, 0.2, None),  # the same distance, 0.2 allowed
        (-2.0, 0.5, 0.8, 1.6),  # on its way back
        (2.0, 1.0, 0.9, 0.9),  # a certain token became uncertain: ln(1 / 0.9)
        (2.0, 0.9, 1.0, None),  # one that became certain is infinitely far away
        (-2.0, 0.9, 1.0, 1 / 0.9),
        (2.0, 1.0, 1.0, 1.0),
    ],
)
def test_dppo_kl_trusts_the_binary_kl(advantage, old, new, weight):
    loss, gradient, sums = one("dppo_kl", probabilities(advantage, old, new))
    assert gradient == pytest.approx(-advantage * (weight or 0.0))
    assert loss == pytest.approx(-advantage * (weight or 0.0) * math.log(new))
    assert sums["pg_clipfrac"] == (weight is None)


@pytest.mark.parametrize(("rest", "clipped"), [(1e-8, 0), (1e-9, 1)])
def test_dppo_kl_of_nearly_certain_tokens_survives_float32(rest, clipped):
    # 0.98 ln 0.98 + 0.02 ln(0.02 / rest) is 0.270 and 0.316, while 1 - exp(-rest) is 0 in float32.
    data = loss_input([Row([-rest], [math.log(0.98)], [1.0])], dtype=torch.float32)
    _, sums = get_policy_loss("dppo_kl").function(data, CONFIG)
    assert sums["pg_clipfrac"][0] == clipped
