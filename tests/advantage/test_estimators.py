"""What holds for every estimator; formulas are tested beside the modules that hold them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.advantage.estimators import get_adv_estimator
from pipeline.config.algorithm import AlgorithmConfig
from tests.advantage.ragged_batches import NAMES, Row, assert_close, estimate, flat, ragged_rows, rows_of

SCOPES = {name: get_adv_estimator(name).scope for name in NAMES}
NEEDS = {
    "gae": ("values",),
    "gdpo": ("parts",),
    "remax": ("baselines",),
    "optimal_token_baseline": ("sum_pi_squared",),
    "tir_optimal_token_baseline": ("sum_pi_squared",),
}

each = pytest.mark.parametrize("name", NAMES)
few = settings(max_examples=25)


def test_scopes():
    assert {name for name, scope in SCOPES.items() if scope == "batch"} == {
        "gae",
        "gdpo",
        "gpg",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
    }


@each
@few
@given(rows=ragged_rows())
def test_it_reads_only_what_it_needs(name, rows):
    assert get_adv_estimator(name).needs == NEEDS.get(name, ())
    unneeded = dict.fromkeys({"values", "baselines", "sum_pi_squared", "parts"} - set(NEEDS.get(name, ())))
    config = AlgorithmConfig(gdpo_reward_keys=["score"])
    function = get_adv_estimator(name).function
    got, whole = function(replace(flat(rows), **unneeded), config), function(flat(rows), config)
    assert np.array_equal(got.advantages, whole.advantages) and np.array_equal(got.returns, whole.returns)


@each
@pytest.mark.parametrize("by_std", [True, False])
@few
@given(rows=ragged_rows())
def test_finite_and_zero_where_the_mask_is_false(name, by_std, rows):
    for tokens in estimate(name, rows, norm_adv_by_std_in_grpo=by_std, handle_zero_tail=by_std):
        assert np.isfinite(np.concatenate([[], *tokens])).all()
        assert [len(row) for row in tokens] == [len(row.mask) for row in rows]
        assert not any(
            x for row, xs in zip(rows, tokens, strict=True) for x, m in zip(xs, row.mask, strict=True) if not m
        )


@each
@few
@given(rows=ragged_rows(), order=st.randoms(use_true_random=False))
def test_order_of_rows_and_numbers_of_groups_do_not_matter(name, rows, order):
    if name == "online_dpo":
        # Of equally good rows it takes one, and which one is a matter of order.
        rows = [replace(row, score=row.score + place / 100) for place, row in enumerate(rows)]
    places = list(range(len(rows)))
    order.shuffle(places)
    moved = [replace(rows[place], group={0: 5, 1: 0, 2: 3, 3: 1}[rows[place].group]) for place in places]
    for got, expected in zip(estimate(name, moved), estimate(name, rows), strict=True):
        assert_close(got, [expected[place] for place in places])


@pytest.mark.parametrize("name", [name for name in NAMES if SCOPES[name] == "group"])
@few
@given(rows=ragged_rows())
def test_scope_group_gives_the_same_group_by_group(name, rows):
    whole = estimate(name, rows)
    for g in {row.group for row in rows}:
        alone = estimate(name, [row for row in rows if row.group == g])
        for got, expected in zip(alone, whole, strict=True):
            assert_close(got, [xs for row, xs in zip(rows, expected, strict=True) if row.group == g])


@pytest.mark.parametrize("name", [name for name in NAMES if SCOPES[name] == "batch"])
def test_scope_batch_is_no_luxury(name):
    rows = rows_of([1, 0, 0, 3, 1, 1], [0, 0, 0, 1, 1, 1], [1, 2, 3, 1, 2, 3])
    first = estimate(name, rows[:3])[0]
    assert not np.allclose(np.concatenate(first), np.concatenate(estimate(name, rows)[0][:3]), atol=1e-3)


@each
@few
@given(rows=ragged_rows())
def test_numbers_on_masked_tokens_do_not_matter(name, rows):
    def spoil(row: Row) -> Row:
        def held(numbers: list[float]) -> list[float]:
            return [x if m else math.nan for x, m in zip(numbers, row.mask, strict=True)]

        fields = ("penalties", "values", "log_probs", "sum_pi_squared")
        return replace(row, **{field: held(getattr(row, field)) for field in fields})

    assert estimate(name, [spoil(row) for row in rows]) == estimate(name, rows)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "optimal_token_baseline"])
@few
@given(rows=ragged_rows())
def test_masked_tokens_are_no_steps(name, rows):
    discounts = {"gamma": 0.9, "lam": 0.8, "turn_gamma": 0.7}
    without = estimate(name, [row.without_masked_tokens() for row in rows], **discounts)
    for got, expected in zip(estimate(name, rows, **discounts), without, strict=True):
        trained = [[x for x, m in zip(xs, row.mask, strict=True) if m] for row, xs in zip(rows, got, strict=True)]
        assert_close(trained, expected)
