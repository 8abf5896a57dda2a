import math

import numpy as np
import pytest

from tests.losses.batches import Row, actor, evaluate, ratios


@pytest.mark.parametrize("name", ["gpg", "reinforce"])
def test_by_hand(name):
    got = evaluate(name, [ratios([2.0, -3.0], [4.0, 0.1], old_log_prob=-5.0)], actor())
    assert got.per_token.tolist() == pytest.approx([2 * (5 - math.log(4)), -3 * (5 - math.log(0.1))])
    assert got.gradient == [-2.0, 3.0]
    assert got.sums == {"ppo_kl": (pytest.approx(-math.log(0.4)), 2)}


def test_importance_weights_make_reinforce_the_gradient_of_the_policy():
    """Exactly, over a categorical policy p whose tokens come from q: sum of q w grad(-A log p) = grad of -sum p A."""
    logits, q, a = np.array([0.3, -0.2, 1.1]), np.array([0.5, 0.3, 0.2]), np.array([1.0, -2.0, 0.5])
    p = np.exp(logits) / np.exp(logits).sum()
    gradient = evaluate("reinforce", [Row(np.log(p), np.log(q), a)], actor()).gradient  # by each log p
    by_logits = (q * (p / q) * gradient) @ (np.eye(3) - p)
    np.testing.assert_allclose(by_logits, -p * (a - p @ a), rtol=1e-12)
