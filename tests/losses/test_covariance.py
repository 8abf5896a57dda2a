import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.losses import Candidates, get_policy_loss
from pipeline.losses.covariance import clip_cov_mask, covariances, kl_cov_mask
from tests.losses.batches import Row, actor, candidates, evaluate, loss_input, random_row, ratios

SELECTS = {"clip_cov": clip_cov_mask, "kl_cov": kl_cov_mask}
# Means: advantages 0.5, log-probs -2. Covariances 0.5 * 1, 1.5 * -1, -2.5 * -2, 0.5 * 2.
FOUR = candidates(
    [Row([-1.0, -3.0, -4.0, 0.0], [-1.0, -3.0, -4.0, 0.0], [1.0, 2.0, -2.0, 1.0], keys=[0.9, 0.1, 0.3, 0.5])]
)


def chosen(name, tokens, **options):
    """Places of the selected tokens."""
    return np.flatnonzero(SELECTS[name](tokens, actor(**options))).tolist()


def test_covariances_by_hand():
    assert covariances(FOUR).tolist() == [0.5, -1.5, 5.0, 1.0]


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.0, [2]), (0.25, [2]), (0.49, [2]), (0.5, [2, 3]), (0.75, [0, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_kl_cov_takes_the_highest_and_at_least_one(ratio, expected):
    assert chosen("kl_cov", FOUR, kl_cov_ratio=ratio) == expected


def test_kl_cov_breaks_ties_by_key():
    tied = replace(FOUR, advantages=np.ones(4))  # all covariances are 0
    assert chosen("kl_cov", tied, kl_cov_ratio=0.5) == [1, 2]


@pytest.mark.parametrize(
    ("ratio", "lb", "ub", "expected"),
    [
        (1.0, 0.4, 6.0, [0, 2, 3]),
        (1.0, 0.5, 5.0, [3]),  # bounds are exclusive
        (0.5, 0.4, 6.0, [2, 3]),  # by smallest key: 0.3, 0.5
        (0.25, 0.4, 6.0, [2]),
        (0.0, 0.4, 2.0, [3]),  # at least one: 0.5 before 0.9
        (1.0, 7.0, 9.0, []),
    ],
)
def test_clip_cov_draws_between_the_bounds_and_at_least_one(ratio, lb, ub, expected):
    assert chosen("clip_cov", FOUR, clip_cov_ratio=ratio, clip_cov_lb=lb, clip_cov_ub=ub) == expected


def test_clip_cov_passes_over_tokens_that_the_clip_already_holds():
    options = {"clip_cov_ratio": 1.0, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}
    # Ratios 1.5 with A > 0 and 0.5 with A < 0 are held, each on the other side is not.
    held = replace(FOUR, old_log_probs=FOUR.log_probs - np.log([1.5, 0.5, 0.5, 1.0]))
    assert chosen("clip_cov", held, **options) == [1, 3]
    assert chosen("clip_cov", replace(held, advantages=-held.advantages), **options) == [0, 2, 3]


@pytest.mark.parametrize("name", SELECTS)
def test_no_tokens(name):
    assert chosen(name, Candidates(*(np.zeros(0) for _ in range(4)))) == []


@pytest.mark.parametrize("name", SELECTS)
@settings(max_examples=40)
@given(st.integers(1, 60), st.integers(0, 2**32))
def test_the_choice_does_not_depend_on_the_order_of_tokens(name, size, seed):
    rng = np.random.default_rng(seed)
    tokens = candidates([random_row(rng, size)])
    order = rng.permutation(size)
    shuffled = Candidates(*(getattr(tokens, column)[order] for column in tokens.__dataclass_fields__))
    np.testing.assert_array_equal(covariances(shuffled), covariances(tokens)[order])
    select = SELECTS[name]
    np.testing.assert_array_equal(select(shuffled, actor()), select(tokens, actor())[order])


def test_clip_cov_loss_by_hand():
    row = ratios([2.0, 2.0, 2.0, -2.0], [1.2, 1.2, 1.5, 4.0], token_mask=np.array([False, True, False, False]))
    got = evaluate("clip_cov", [row], actor(clip_ratio_low=0.2, clip_ratio_high=0.3))
    assert got.per_token.tolist() == pytest.approx([-2.4, 0.0, -2.6, 8.0])  # no dual clip
    assert got.gradient == pytest.approx([-2.4, 0.0, 0.0, 8.0])
    assert got.sums["cov_frac"] == (1.0, 4) and got.sums["pg_clipfrac"] == (1.0, 4)


def test_kl_cov_loss_by_hand():
    row = ratios([2.0, 2.0, -1.0, 0.0], [1.5, 1.5, 0.5, 2.0], token_mask=np.array([False, True, True, True]))
    got = evaluate("kl_cov", [row], actor(ppo_kl_coef=0.1))
    penalties = [0.0, 0.1 * math.log(1.5), 0.1 * math.log(2), 0.1 * math.log(2)]
    assert got.per_token.tolist() == pytest.approx(np.add([-3.0, -3.0, 0.5, 0.0], penalties))
    assert got.gradient == pytest.approx([-3.0, -3.0 + 0.1, 0.5 - 0.1, 0.1])
    assert got.sums == {"cov_frac": (3.0, 4), "ppo_kl": (pytest.approx(-2 * math.log(1.5)), 4)}
    # It pulls back from any distance.
    far = Row([-1.0], [-51.0], [0.0], token_mask=np.array([True]))
    assert evaluate("kl_cov", [far], actor(ppo_kl_coef=0.1)).gradient == [0.1]


@pytest.mark.parametrize("name", SELECTS)
def test_a_token_that_was_rejected_after_it_was_chosen_does_not_count(name):
    row = ratios([1.0, 1.0], [1.5, 1.5], mask=np.array([1, 0]), token_mask=np.array([True, True]))
    got = evaluate(name, [row], actor())
    assert got.per_token[1] == 0.0 and got.sums["cov_frac"] == (1.0, 1)


@pytest.mark.parametrize("name", SELECTS)
def test_the_selection_is_asked_for(name):
    with pytest.raises(ValueError, match=f"'{name}' was called without `token_mask`"):
        get_policy_loss(name).function(replace(loss_input([ratios([1.0], [1.0])]), token_mask=None), actor())
