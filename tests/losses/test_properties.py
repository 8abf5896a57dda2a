"""What holds for every policy loss in every aggregation mode."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.losses import AGG_MODES, get_policy_loss
from tests.losses.batches import NAMES, Row, actor, choose, counts, evaluate, random_row

CONFIG = actor()
PULLING = {"dro", "kl_cov"}
"""Losses that hold the policy where there is no advantage, too."""

every_loss = pytest.mark.parametrize("name", NAMES)


@st.composite
def batches(draw, least_rows=1):
    """Rows of 0 to 5 tokens, all of which train."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=least_rows, max_size=7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return [random_row(rng, length) for length in lengths]


def assert_same(got, expected):
    """Metrics, and losses and gradients in every mode, of two evaluations agree; gradients are lists of arrays."""
    for mode in AGG_MODES:
        assert got.losses[mode] == pytest.approx(expected.losses[mode], rel=1e-9, abs=1e-12), mode
        for one, other in zip(got.gradients[mode], expected.gradients[mode], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12, err_msg=mode)
    assert got.sums.keys() == expected.sums.keys()
    for name, (total, count) in expected.sums.items():
        assert got.sums[name] == (pytest.approx(total, rel=1e-9, abs=1e-12), count)


@every_loss
@settings(max_examples=20)
@given(data=st.data())
def test_any_split_into_micro_batches_gives_the_same(name, data):
    rows = choose(name, data.draw(batches()), CONFIG)
    parts = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    whole = evaluate(name, rows, CONFIG)
    losses, gradients = dict.fromkeys(AGG_MODES, 0.0), {mode: [np.zeros(0)] * len(rows) for mode in AGG_MODES}
    sums = dict.fromkeys(whole.sums, (0.0, 0))
    for part in range(3):  # a part without rows is what a rank runs to keep pace with the others
        places = [i for i, p in enumerate(parts) if p == part]
        share = evaluate(name, [rows[i] for i in places], CONFIG, of=counts(rows))
        for mode in AGG_MODES:
            losses[mode] += share.losses[mode]
            for place, gradient in zip(places, share.gradients[mode], strict=True) if places else ():
                gradients[mode][place] = gradient
        sums = {key: (a + share.sums[key][0], b + share.sums[key][1]) for key, (a, b) in sums.items()}
    assert_same(replace(whole, losses=losses, gradients=gradients, sums=sums), whole)


@every_loss
@settings(max_examples=20)
@given(data=st.data())
def test_masked_tokens_are_as_good_as_absent_whatever_stands_there(name, data):
    rows = data.draw(batches())
    padded, places = [], []
    for row in rows:
        holes = data.draw(st.lists(st.integers(0, len(row.log_probs)), max_size=3))
        junk = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
        padded.append(
            Row(
                *(
                    np.insert(getattr(row, column), holes, value)
                    for column, value in (("log_probs", junk), ("old_log_probs", -junk), ("advantages", junk))
                ),
                mask=np.insert(row.mask, holes, 0.0),
                keys=np.insert(row.keys, holes, 0.0),
            )
        )
        places.append(padded[-1].mask > 0)
    expected = evaluate(name, choose(name, rows, CONFIG), CONFIG)
    got = evaluate(name, choose(name, padded, CONFIG), CONFIG)
    for mode in AGG_MODES:
        assert all(not gradient[~kept].any() for gradient, kept in zip(got.gradients[mode], places, strict=True))
        got.gradients[mode] = [g[kept] for g, kept in zip(got.gradients[mode], places, strict=True)]
    assert_same(got, expected)
    assert not got.per_token[~np.concatenate(places)].any()


@every_loss
@pytest.mark.parametrize("length", [0, 4])
def test_nothing_to_train_gives_zero_and_a_graph(name, length):
    row = Row(np.full(length, np.nan), np.full(length, np.inf), np.ones(length), mask=np.zeros(length))
    got = evaluate(name, choose(name, [row], CONFIG), CONFIG)
    for mode in AGG_MODES:
        assert got.losses[mode] == 0.0
        assert got.gradients[mode][0].tolist() == [0.0] * length
    assert set(got.sums.values()) == {(0.0, 0)}


@pytest.mark.parametrize("name", sorted(set(NAMES) - PULLING))
@settings(max_examples=20)
@given(rows=batches(least_rows=2))
def test_rows_without_advantage_may_be_left_out(name, rows):
    assert get_policy_loss(name).zero_without_advantage
    rows = [replace(row, advantages=row.advantages * (i % 2)) for i, row in enumerate(rows)]
    rows = choose(name, rows, CONFIG)
    whole, kept = evaluate(name, rows, CONFIG), evaluate(name, rows[1::2], CONFIG, of=counts(rows))
    for mode in AGG_MODES:
        assert not any(gradient.any() for gradient in whole.gradients[mode][::2])
        whole.gradients[mode] = whole.gradients[mode][1::2]
    assert_same(kept, replace(whole, sums=kept.sums))


@pytest.mark.parametrize("name", sorted(PULLING))
def test_these_losses_pull_on_tokens_without_advantage(name):
    assert not get_policy_loss(name).zero_without_advantage
    row = random_row(np.random.default_rng(0), 4)
    got = evaluate(name, choose(name, [replace(row, advantages=np.zeros(4))], CONFIG), CONFIG)
    assert got.losses["token-sum"] > 0.0 and any(got.gradient)


@every_loss
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_prob", [-1e-9, -600.0])
@pytest.mark.parametrize("old_log_prob", [-1e-9, -600.0])
def test_the_farthest_policies_stay_finite(name, advantage, log_prob, old_log_prob):
    row = Row(np.array([log_prob]), np.array([old_log_prob]), np.array([advantage]))
    got = evaluate(name, choose(name, [row], CONFIG), CONFIG)
    assert np.isfinite([*got.losses.values(), *got.gradient]).all()
    assert all(np.isfinite(total) for total, _ in got.sums.values())
    assert got.sums["ppo_kl"][0] == pytest.approx(np.clip(old_log_prob - log_prob, -20, 20))


@every_loss
@settings(max_examples=20)
@given(rows=batches())
def test_a_token_of_a_per_token_loss_depends_on_no_other(name, rows):
    rows = choose(name, rows, CONFIG)
    pieces = [
        Row(
            *(getattr(row, column)[[token]] for column in ("log_probs", "old_log_probs", "advantages", "mask")),
            token_mask=row.token_mask[[token]],
        )
        for row in rows
        for token in range(len(row.log_probs))
    ]
    whole, apart = evaluate(name, rows, CONFIG), evaluate(name, pieces, CONFIG)
    same = np.allclose(whole.per_token, apart.per_token, rtol=1e-9, atol=1e-12)
    same &= np.allclose(whole.gradient, apart.gradient, rtol=1e-9, atol=1e-12)
    assert same or not get_policy_loss(name).per_token


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
def test_these_losses_read_whole_sequences(name):
    assert not get_policy_loss(name).per_token
    row = Row([-1.0, -1.2, -0.8], [-1.1, -1.0, -1.0], [1.0, 1.0, 1.0])
    other = replace(row, log_probs=row.log_probs + [0, 0, 0.05])
    assert evaluate(name, [row], CONFIG).per_token[0] != evaluate(name, [other], CONFIG).per_token[0]
