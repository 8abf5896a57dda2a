import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.advantage.config import AlgorithmConfig
from pipeline.advantage.estimators import EstimatorInput, get_adv_estimator, grpo, register_adv_est
from pipeline.advantage.stage import on_last_token


def data(rewards, group, lengths=None, mask=None) -> EstimatorInput:
    lengths = [1] * len(rewards) if lengths is None else lengths
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = np.ones(offsets[-1], dtype=bool) if mask is None else np.array(mask, dtype=bool)
    rewards = np.array(rewards, dtype=np.float64)
    return EstimatorInput(
        rewards, np.array(group, dtype=np.int64), offsets, mask, on_last_token(rewards, offsets, mask)
    )


def advantages(rewards, group, *, std=True, **shape) -> list[float]:
    estimate = grpo(data(rewards, group, **shape), AlgorithmConfig(norm_adv_by_std_in_grpo=std))
    assert np.array_equal(estimate.advantages, estimate.returns)
    return estimate.advantages.tolist()


def test_grpo_by_hand():
    # Group 0: mean 0.5, squared deviations 4 * 0.25, over 3: std 1 / sqrt(3). Group 1: mean 2, std 1.
    rewards, group = [1, 0, 1, 2, 3, 0, 1], [0, 0, 0, 1, 1, 0, 1]
    a, b = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1 / (1 + 1e-6)
    assert advantages(rewards, group) == pytest.approx([a, -a, a, 0, b, -a, -b], abs=1e-12)
    assert advantages(rewards, group, std=False) == pytest.approx([0.5, -0.5, 0.5, 0, 1, -0.5, -1], abs=1e-12)


def test_tokens_of_a_row_share_its_advantage_and_masked_ones_have_none():
    got = advantages([1, 0, 5], [0, 0, 1], std=False, lengths=[3, 0, 2], mask=[1, 0, 1, 1, 1])
    assert got == [0.5, 0, 0.5, 0, 0]


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.7, 1e30, 1e-30])
@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("std", [True, False])
def test_equal_rewards_and_single_rows_give_exactly_zero(reward, size, std):
    # 0.1 + 0.1 + 0.1 is not 3 * 0.1: without care the rest of rounding is divided by an equally small deviation.
    assert advantages([reward] * size, [0] * size, std=std) == [0.0] * size


def test_nothing_is_fine():
    assert advantages([], []) == []


rewards_and_groups = st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.integers(0, 3)), min_size=1, max_size=20)


@settings(max_examples=100, deadline=None)
@given(rewards_and_groups, st.booleans())
def test_grpo_is_finite_centred_scaled_and_keeps_the_order(rows, std):
    rewards, group = np.array([r for r, _ in rows]), np.array([g for _, g in rows])
    got = np.array(advantages(rewards, group, std=std))
    assert np.isfinite(got).all()
    for g in set(group):
        mine, r = got[group == g], rewards[group == g]
        assert abs(mine.sum()) <= 1e-9 * max(1.0, np.abs(rewards).max())
        assert all(mine[i] <= mine[j] for i in range(len(r)) for j in range(len(r)) if r[i] <= r[j])
        if std and np.ptp(r) > 1:
            assert mine.std(ddof=1) == pytest.approx(1.0, abs=1e-5)


@settings(max_examples=50, deadline=None)
@given(rewards_and_groups, st.randoms(use_true_random=False))
def test_order_of_rows_and_other_groups_do_not_matter(rows, random):
    expected = dict(enumerate(advantages([r for r, _ in rows], [g for _, g in rows])))
    order = list(range(len(rows)))
    random.shuffle(order)
    got = advantages([rows[i][0] for i in order], [rows[i][1] for i in order])
    assert all(got[place] == pytest.approx(expected[i], rel=1e-6, abs=1e-9) for place, i in enumerate(order))
    for g in {g for _, g in rows}:
        mine = [i for i, row in enumerate(rows) if row[1] == g]
        alone = advantages([rows[i][0] for i in mine], [0] * len(mine))
        assert alone == pytest.approx([expected[i] for i in mine], rel=1e-6, abs=1e-9)


def test_reward_stands_on_the_last_token_the_policy_chose():
    shape = data([1, 2, 3, 4], [0, 0, 0, 0], lengths=[3, 0, 2, 2], mask=[1, 1, 0, 0, 0, 1, 1])
    assert shape.token_rewards.tolist() == [0, 1, 0, 0, 0, 0, 4]
    assert shape.lengths.tolist() == [3, 0, 2, 2]
    assert on_last_token(np.array([1.0]), np.array([0, 0]), np.array([], dtype=bool)).tolist() == []
    assert on_last_token(np.array([1.0, 2.0]), np.array([0, 1, 2]), np.zeros(2, dtype=bool)).tolist() == [0, 0]


def test_registry():
    assert get_adv_estimator("grpo").function is grpo
    assert get_adv_estimator("grpo").scope == "group"
    with pytest.raises(ValueError, match=r"'grop' is unknown. Did you mean 'grpo'\?"):
        get_adv_estimator("grop")
    with pytest.raises(ValueError, match="registered twice"):
        register_adv_est("grpo", scope="group")(lambda data, config: None)
    with pytest.raises(ValueError, match="'group' or 'batch'"):
        register_adv_est("other", scope="token")


def test_import_path():
    assert get_adv_estimator("pipeline.advantage.estimators:grpo").function is grpo
    with pytest.raises(ValueError, match="module 'no.such' cannot be imported"):
        get_adv_estimator("no.such:f")
    with pytest.raises(ValueError, match="has no function 'nothing'"):
        get_adv_estimator("pipeline.advantage.estimators:nothing")
    with pytest.raises(ValueError, match="has no function 'GRPO_EPS'"):
        get_adv_estimator("pipeline.advantage.estimators:GRPO_EPS")
