import math

import pytest

from tests.advantage.ragged_batches import Row, advantages, assert_close, rows_of, spread

OUTCOME = ["grpo", "gdpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"]


def numbers(name: str, scores, group=None, lengths=None, **config) -> list[float]:
    """The one advantage of each row."""
    got = advantages(name, rows_of(scores, group, lengths), **config)
    assert all(len(set(row)) == 1 for row in got)
    return [row[0] for row in got]


def test_grpo_by_hand():
    # Group 0: mean 0.5, squared deviations 4 * 0.25, over 3: std 1 / sqrt(3). Group 1: mean 2, std 1.
    scores, group = [1, 0, 1, 2, 3, 0, 1], [0, 0, 0, 1, 1, 0, 1]
    a, b = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1 / (1 + 1e-6)
    assert numbers("grpo", scores, group) == pytest.approx([a, -a, a, 0, b, -a, -b], abs=1e-12)
    dr_grpo = numbers("grpo", scores, group, norm_adv_by_std_in_grpo=False)
    assert dr_grpo == pytest.approx([0.5, -0.5, 0.5, 0, 1, -0.5, -1], abs=1e-12)


def test_gdpo_by_hand():
    # Both groups have one reward that tells its two rows apart: by 1 (std sqrt(1/2)) and by 2 (std sqrt(2)).
    rows = [Row(1.0, 0), Row(0.0, 0), Row(1.0, 1, format=2.0), Row(1.0, 1)]
    a, b = 0.5 / (math.sqrt(0.5) + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    for weights, w in ((None, 1.0), ([1.0, 0.5], 0.5)):
        scale = math.sqrt((2 * a**2 + 2 * (w * b) ** 2) / 3 + 1e-8)
        got = advantages("gdpo", rows, gdpo_reward_weights=weights)
        assert_close(got, [[a / scale], [-a / scale], [w * b / scale], [-w * b / scale]], 1e-12)
    # Without the division a difference of 2 is twice one of 1.
    got = advantages("gdpo", rows, norm_adv_by_std_in_grpo=False)
    assert got[2][0] == pytest.approx(2 * got[0][0])
    # A small reward beside a large one: the sum of both would not show it, GDPO weighs them alike.
    rows = [Row(s, 0, format=f) for s, f in ((1000.0, 0.0), (1000.0, 1.0), (0.0, 0.0), (0.0, 1.0))]
    got = [row[0] for row in advantages("gdpo", rows)]
    assert got == pytest.approx([0, math.sqrt(1.5), -math.sqrt(1.5), 0], abs=1e-5)


def test_gdpo_says_what_is_wrong_with_its_keys():
    rows = [Row(1.0), Row(math.nan)]
    with pytest.raises(ValueError, match=r"gdpo_reward_keys is empty; .* some of format, score"):
        advantages("gdpo", rows, gdpo_reward_keys=[])
    with pytest.raises(ValueError, match=r"names 'style', which .* known are format, score"):
        advantages("gdpo", rows, gdpo_reward_keys=["format", "style"])
    for weights in ([], [1.0], [1.0] * 3):
        with pytest.raises(ValueError, match=rf"weights has length {len(weights)} and gdpo_reward_keys has length 2"):
            advantages("gdpo", rows, gdpo_reward_weights=weights)
    with pytest.raises(ValueError, match="the reward part 'score' .* is nan in a row"):
        advantages("gdpo", rows)


def test_grpo_passk_by_hand():
    # Group 0: 3 surpasses 2 by 1, std 1. Group 1 has two best rows. Group 2 has one row.
    scores, group = [2, 5, 3, 1, 5, 0, 9], [0, 1, 0, 0, 1, 1, 2]
    assert numbers("grpo_passk", scores, group) == pytest.approx([0, 0, 1 / (1 + 1e-6), 0, 0, 0, 0], rel=1e-12)
    scores[2] = 4
    assert numbers("grpo_passk", scores, group, norm_adv_by_std_in_grpo=False) == [0, 0, 2, 0, 0, 0, 0]


def test_online_dpo_by_hand():
    # Group 0: best 3, worst 0. Group 1 has equal rewards, group 2 one row. Group 3 has two best and two worst rows.
    scores, group = [2, 5, 3, 0, 5, 9, 1, 0, 1, 0], [0, 1, 0, 0, 1, 2, 3, 3, 3, 3]
    found = numbers("online_dpo", scores, group)
    assert found[:6] == [0, 0, 1, -1, 0, 0]
    assert sorted(found[6:]) == [-1, 0, 0, 1] and found[6] + found[8] == 1 and found[7] + found[9] == -1


def test_rloo_by_hand():
    # 3 against the mean 0 of the others; 0 against 1.5. In a pair each is the other's baseline.
    assert numbers("rloo", [3, 0, 0, 1, 2], [0, 0, 0, 1, 1]) == pytest.approx([3, -1.5, -1.5, -1, 1])


def test_opo_by_hand():
    # (3 * 1 + 1 * 0) / 4. Tokens of tools have no weight, nor has a row that is cut before its first token.
    rows = [Row(1.0, 0, [1, 1, 0, 0, 1]), Row(0.0, 0, [1]), Row(100.0, 0, [0, 0])]
    assert_close(advantages("opo", rows), spread(rows, [0.25, -0.75, 0]))
    assert advantages("opo", [Row(1.0, 0, [0]), Row(2.0, 0, [])]) == [[0], []]


def test_gpg_by_hand():
    # One of six rewards is not 0.
    assert numbers("gpg", [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1], f_norm=2.0) == [2.25, -0.75, -0.75, -0.75, 0, 0]
    assert numbers("gpg", [0, 0, 0]) == [0, 0, 0]


def test_reinforce_plus_plus_baseline_by_hand():
    # Tokens 0.5, -0.5, -0.5, -0.5: mean -0.25, deviations 0.75 and -0.25, variance 0.75 / 3.
    assert numbers("reinforce_plus_plus_baseline", [1, 0], lengths=[1, 3]) == pytest.approx([1.5, -0.5], rel=1e-7)
    # A group of equal rewards is moved by the batch's mean, as the module says.
    assert numbers("reinforce_plus_plus_baseline", [1, 0, 7, 7], [0, 0, 1, 1], [1, 3, 1, 1])[2] > 0


@pytest.mark.parametrize("name", OUTCOME)
@pytest.mark.parametrize("by_std", [True, False])
def test_equal_rewards_and_single_rows_give_exactly_zero(name, by_std):
    for score in (0.0, 0.1, 1 / 3, -7.7, 1e30, 1e-30):
        for lengths in ([2], [1, 2, 3], [1, 3, 2, 1, 1, 3, 1]):
            rows = rows_of([score] * len(lengths), lengths=lengths)
            assert advantages(name, rows, norm_adv_by_std_in_grpo=by_std) == [[0.0] * n for n in lengths]
