"""Scale, normalisation, penalties and bounds, against hand-worked numbers and properties."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.reward import OverlongBufferConfig, RepetitionPenaltyConfig, RewardConfig
from pipeline.reward.shaping import Shaping, overlong_penalty, repeated_share


def test_overlong_penalty_of_dapo() -> None:
    """DAPO, equation 13, with L_max = 100 and L_cache = 20: 0 up to 80 tokens, -1 at 100, linear between."""
    config = OverlongBufferConfig(enable=True, len=20, penalty_factor=1.0)
    got = overlong_penalty(np.array([0.0, 80, 85, 90, 100]), 100, config)
    np.testing.assert_allclose(got, [0, 0, -0.25, -0.5, -1])
    config.penalty_factor = 0.5
    np.testing.assert_allclose(overlong_penalty(np.array([90.0, 100]), 100, config), [-0.25, -0.5])


@pytest.mark.parametrize(
    ("tokens", "ngram", "share"),
    [
        ([], 2, 0.0),
        ([1], 2, 0.0),
        ([1, 1], 2, 0.0),
        ([1, 1, 1], 2, 0.5),
        ([1, 2, 1, 2, 1], 2, 0.5),
        ([1, 2, 3, 4], 1, 0.0),
        ([7] * 11, 1, 10 / 11),
        ([1, 2, 3, 1, 2, 3], 3, 0.25),
    ],
)
def test_repeated_share_by_hand(tokens: list[int], ngram: int, share: float) -> None:
    assert repeated_share(np.array(tokens), ngram) == pytest.approx(share)


@given(st.lists(st.integers(0, 4), max_size=40), st.integers(1, 5))
def test_repeated_share_counts_what_stood_before(tokens: list[int], ngram: int) -> None:
    grams = [tuple(tokens[i : i + ngram]) for i in range(len(tokens) - ngram + 1)]
    repeats = sum(count - 1 for count in Counter(grams).values())
    assert repeated_share(np.array(tokens), ngram) == pytest.approx(repeats / len(grams) if len(grams) > 1 else 0.0)


def test_repetition_penalty() -> None:
    shaping = Shaping(RewardConfig(repetition_penalty=RepetitionPenaltyConfig(factor=2.0, ngram=1)))
    score, parts = shaping(np.array([1.0, 1.0]), ["s", "s"], [np.array([5, 5, 5, 5]), np.array([1, 2, 3, 4])])
    np.testing.assert_allclose(score, [1 - 2 * 0.75, 1.0])
    np.testing.assert_allclose(parts["repetition_penalty"], [-1.5, 0.0])


def test_order_of_the_steps_and_their_record() -> None:
    config = RewardConfig(
        source_scale={"s": 2.0},
        normalize={"s": [1.0, 2.0], "t": [0.5, 1.0]},
        overlong_buffer=OverlongBufferConfig(enable=True, len=10),
        length_penalty=1.0,
        clip=[-1.0, 0.4],
    )
    lengths = (10, 100, 0, 20)
    score, parts = Shaping(config, 100)(
        np.array([4.0, 0.0, 1.0, 1.0]), ["s", "s", "s", "t"], [np.arange(n) for n in lengths]
    )
    # (4 * 2 - 1) / 2 - 0.1 = 3.4; (0 - 1) / 2 - 1 - 1 = -2.5; (2 - 1) / 2 = 0.5: bounds come last. 1 - 0.5 - 0.2 = 0.3
    np.testing.assert_allclose(score, [0.4, -1.0, 0.4, 0.3])
    np.testing.assert_allclose(parts["raw_score"], [4.0, 0.0, 1.0, 1.0])
    np.testing.assert_allclose(parts["overlong_penalty"], [0, -1, 0, 0])
    np.testing.assert_allclose(parts["length_penalty"], [-0.1, -1, 0, -0.2])
    assert not Shaping(RewardConfig()).used


@pytest.mark.parametrize("settings", [{"length_penalty": 1.0}, {"overlong_buffer": OverlongBufferConfig(True, 4)}])
def test_penalties_on_length_need_the_longest(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"need data\.max_response_length"):
        Shaping(RewardConfig(**settings))
