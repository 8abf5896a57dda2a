import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.advantage.estimators import get_adv_estimator
from pipeline.config.algorithm import AlgorithmConfig
from tests.advantage.ragged_batches import KEYS, NAMES, Row, advantages, assert_close, estimate, flat, ragged_rows

few = settings(max_examples=25)


def episode(*rewards: float, group: int = 0, tokens: int = 1, score: float | None = None) -> Row:
    """An episode of one turn for each reward, with an observation of two tokens behind each turn but the last."""
    mask, turns = [], []
    for turn in range(len(rewards)):
        mask += [0, 0] * (turn > 0) + [1] * tokens
        turns += [-1, -1] * (turn > 0) + [turn] * tokens
    total = sum(rewards) if score is None else score
    return Row(total, group, mask, turns=turns, turn_rewards=dict(enumerate(rewards)))


def test_turn_grpo_by_hand():
    # Returns to go: 3 2 and 1 1 and 2. Turn 0: mean 2, std 1. Turn 1: mean 1.5, std sqrt(1/2).
    rows = [episode(1.0, 2.0, tokens=2), episode(0.0, 1.0), episode(2.0)]
    got, returns = estimate("turn_grpo", rows, norm_adv_by_std_in_grpo=False)
    assert returns == [[3, 3, 0, 0, 2, 2], [1, 0, 0, 1], [2]]
    assert got == [[1, 1, 0, 0, 0.5, 0.5], [-1, 0, 0, -0.5], [0]]
    a, b = 1 / (1 + 1e-6), 0.5 / (math.sqrt(0.5) + 1e-6)
    assert_close(advantages("turn_grpo", rows), [[a, a, 0, 0, b, b], [-a, 0, 0, -b], [0]])
    # Turns weigh half of the one before: 1 + 2 / 2, 0 + 1 / 2 and 2, whose mean is 1.5.
    got, returns = estimate("turn_grpo", rows, norm_adv_by_std_in_grpo=False, turn_gamma=0.5)
    assert returns == [[2, 2, 0, 0, 2, 2], [0.5, 0, 0, 1], [2]]
    assert got == [[0.5, 0.5, 0, 0, 0.5, 0.5], [-1, 0, 0, -0.5], [0.5]]
    # Tokens pay in their own turn, and what no turn got is in the last one.
    rows = [episode(1.0, 0.0, score=3.0), episode(0.0, 0.0)]
    rows[0].penalties = [0.25, 9.0, 9.0, 0.5]
    assert estimate("turn_grpo", rows)[1] == [[2.25, 0, 0, 1.5], [0, 0, 0, 0]]


def test_a_turn_is_compared_with_the_same_turn_of_its_group_alone():
    # A late turn of one sample alone, and of another group, has nothing to be compared with.
    rows = [episode(0.0, 0.0, 5.0), episode(1.0, 1.0), episode(0.0, 0.0, 7.0, group=1)]
    got = advantages("turn_grpo", rows, norm_adv_by_std_in_grpo=False)
    assert got == [[1.5, 0, 0, 2, 0, 0, 0], [-1.5, 0, 0, -2], [0] * 7]


def test_equal_returns_give_exactly_zero():
    # 0.1 + 0.2 + 0.3 differs from 0.3 + 0.2 + 0.1 in the last place.
    rows = [episode(0.1, 0.2, 0.3), episode(0.3, 0.2, 0.1), episode(0.2, 0.3, 0.1)]
    assert {xs[0] for xs in advantages("turn_grpo", rows)} == {0.0}


def test_an_answer_that_does_not_train_does_not_count():
    rows = [episode(0.0, 4.0, 1.0), episode(0.0, 2.0, 2.0)]
    rows[0].mask[3] = 0
    # The reward of the masked answer comes at the end: nothing says what else earned it.
    got, returns = estimate("turn_grpo", rows, norm_adv_by_std_in_grpo=False)
    assert returns == [[5, 0, 0, 0, 0, 0, 5], [4, 0, 0, 4, 0, 0, 2]]
    assert got == [[0.5, 0, 0, 0, 0, 0, 1.5], [-0.5, 0, 0, 0, 0, 0, -1.5]]


@few
@given(rows=ragged_rows(), by_std=st.booleans())
def test_with_one_turn_it_is_grpo(rows, by_std):
    for row in rows:
        row.turns = [0] * len(row.mask)
    # GRPO counts the reward of a row without trained tokens.
    rows = [row for row in rows if any(row.mask)]
    config = {"norm_adv_by_std_in_grpo": by_std, "turn_gamma": 0.5}
    assert_close(advantages("turn_grpo", rows, **config), advantages("grpo", rows, **config), 1e-5)


def test_the_discount_of_a_turn_in_sums_over_tokens():
    # Two turns of two tokens; the step between them counts 0.5 * 0.8.
    row = episode(1.0, 2.0, tokens=2)
    row.values = [0.1, 0.2, 9.0, math.nan, 0.3, 0.4]
    row.baseline = 0.5
    discounts = {"gamma": 0.8, "turn_gamma": 0.5}
    # G: 2, 1.6, then 1 + 0.4 * 1.6 = 1.64 and 0.8 * 1.64.
    returns = [1.312, 1.64, 0, 0, 1.6, 2.0]
    got, found = estimate("remax", [row], **discounts)
    assert_close([found[0], got[0]], [returns, [x - 0.5 if x else 0 for x in returns]])
    assert_close(estimate("reinforce_plus_plus", [row], **discounts)[1], [returns])
    # GAE with lambda 1 sums the same rewards; with lambda 0 the critic's value of the next answer stands for the rest.
    assert_close(estimate("gae", [row], **discounts)[1], [returns])
    step = [0.8 * 0.2, 1 + 0.4 * 0.3, 0, 0, 0.8 * 0.4, 2]
    assert_close(estimate("gae", [row], lam=0.0, **discounts)[1], [step])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "turn_grpo"])
@few
@given(rows=ragged_rows())
def test_without_a_discount_turns_do_not_matter_to_others(name, rows):
    config = AlgorithmConfig(gamma=0.9, lam=0.8, gdpo_reward_keys=KEYS)
    function, data = get_adv_estimator(name).function, flat(rows)
    with_turns, without = function(data, config), function(replace(data, turns=None), config)
    assert np.array_equal(with_turns.advantages, without.advantages)
    assert np.array_equal(with_turns.returns, without.returns)
