import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.losses import explained_variance, value_loss
from pipeline.stats import Stat, merge


def of(values, old_values, returns, mask=None, clip=0.5):
    """Losses, gradient and metrics' sums."""
    values = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(len(values)) if mask is None else torch.tensor(mask)
    tensors = (torch.tensor(x, dtype=torch.float64) for x in (old_values, returns))
    loss, sums = value_loss(values, *tensors, mask, clip)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    return loss.tolist(), gradient.tolist(), {name: (float(total), int(count)) for name, (total, count) in sums.items()}


def test_each_branch_of_the_clip():
    loss, gradient, sums = of(
        # within; towards the return and beyond; away from it and beyond; past the return and beyond, twice
        values=[0.3, 2.0, -2.0, 1.2, 1.7],
        old_values=[0.0] * 5,
        returns=[1.0, 3.0, 3.0, 1.0, 1.0],
    )
    assert loss == pytest.approx([0.5 * 0.49, 0.5 * 2.5**2, 0.5 * 25, 0.5 * 0.25, 0.5 * 0.49])
    assert gradient == pytest.approx([-0.7, 0.0, -5.0, 0.0, 0.7])
    assert sums == {"vf_clipfrac": (2.0, 5), "vpred_mean": (pytest.approx(3.2), 5)}


def test_masked_tokens_are_not_looked_at():
    for junk in (math.nan, math.inf):
        loss, gradient, sums = of([1.0, junk], [1.0, -junk], [4.0, junk], mask=[1, 0])
        assert loss == [4.5, 0.0] and gradient == [-3.0, 0.0]
        assert sums == {"vf_clipfrac": (0.0, 1), "vpred_mean": (1.0, 1)}


@pytest.mark.parametrize("size", [0, 3])
def test_nothing_to_train(size):
    loss, gradient, sums = of([1.0] * size, [0.0] * size, [9.0] * size, mask=[0.0] * size)
    assert loss == gradient == [0.0] * size
    assert set(sums.values()) == {(0.0, 0)}
    assert explained_variance(torch.ones(size), torch.ones(size), torch.zeros(size)) == ((0, 0, 0), (0, 0, 0))


def explained(residuals, returns):
    return 1 - residuals[2] / returns[2]


@settings(max_examples=50)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 2**32))
def test_explained_variance_of_parts_merges_exactly(sizes, seed):
    rng = np.random.default_rng(seed)
    parts = [(1e4 + rng.normal(size=n), 1e4 + rng.normal(size=n), rng.random(n) < 0.7) for n in [*sizes, 3]]
    parts[-1][2][:] = True
    v, r, keep = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    moments = [explained_variance(*(torch.from_numpy(x) for x in part)) for part in parts]
    merged = merge({"residuals": Stat("std", a), "returns": Stat("std", b)} for a, b in moments)
    got = explained(merged["residuals"].values, merged["returns"].values)
    assert got == pytest.approx(1 - np.var((r - v)[keep]) / np.var(r[keep]), rel=1e-6, abs=1e-6)


def test_explained_variance_of_a_perfect_a_constant_and_a_contrary_critic():
    returns, mask = torch.tensor([1.0, 2.0, 6.0, math.nan]), torch.tensor([1, 1, 1, 0])
    assert explained(*explained_variance(returns, returns, mask)) == 1.0
    assert explained(*explained_variance(torch.full_like(returns, 7.0), returns, mask)) == pytest.approx(0.0)
    assert explained(*explained_variance(-returns, returns, mask)) == pytest.approx(-3.0)
