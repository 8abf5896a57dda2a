import math

import pytest

from tests.losses.batches import Row, actor, evaluate, ratios

CONFIG = actor(tau_pos=1.0, tau_neg=1.05, dro_beta=0.4)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_sapo_by_hand():
    got = evaluate("sapo", [ratios([2.0, 1.0, -1.0, -1.0], [1.0, 2.0, 2.0, 1.0])], CONFIG)
    gates = [4 * sigmoid(1.0), 4 / 1.05 * sigmoid(1.05)]
    assert got.per_token.tolist() == pytest.approx([-4.0, -gates[0], gates[1], 2 / 1.05])
    # sigmoid' = sigmoid (1 - sigmoid), times 4 r: the plain gradient -A r at r = 1, and less of it further away.
    slopes = [8 * sigmoid(tau) * (1 - sigmoid(tau)) for tau in (1.0, 1.05)]
    assert got.gradient == pytest.approx([-2.0, -slopes[0], slopes[1], 1.0])
    assert slopes[1] < slopes[0] < 2.0
    assert got.sums == {"ppo_kl": (pytest.approx(-2 * math.log(2)), 4)}


def test_dro_by_hand():
    got = evaluate("dro", [Row([-1.0, -1.0, -1.0], [-1.5, -1.0, -2.0], [2.0, 2.0, 0.0])], CONFIG)
    assert got.per_token.tolist() == pytest.approx([2.0 + 0.2 * 0.25, 2.0, 0.2])
    assert got.gradient == pytest.approx([-2.0 + 0.4 * 0.5, -2.0, 0.4])
    # It pulls back from any distance.
    assert evaluate("dro", [Row([-1.0], [-51.0], [0.0])], CONFIG).gradient == pytest.approx([0.4 * 50])


@pytest.mark.parametrize("beta", [None, 0.0, -1.0, float("nan")])
def test_dro_needs_its_weight(beta):
    with pytest.raises(ValueError, match=f"dro_beta above 0, but it is {'null' if beta is None else beta}"):
        evaluate("dro", [ratios([1.0], [1.0])], actor(dro_beta=beta))
