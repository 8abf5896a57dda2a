import math

import numpy as np
import pytest

from pipeline.advantage.statistics import deviations, group_sizes, group_std, normalised, whiten

GROUP = np.array([0, 2, 0, 2, 2, 3])


def test_groups_by_hand():
    # Group 0 holds 1 and 2, group 2 holds 4, 8 and 0, group 3 holds 7; no row is of group 1.
    values = np.array([1.0, 4.0, 2.0, 8.0, 0.0, 7.0])
    differences = deviations(values, GROUP)
    assert differences.tolist() == [-0.5, 0, 0.5, 4, -4, 0]
    assert group_sizes(GROUP).tolist() == [2, 1, 3, 1]
    std = [math.sqrt(0.5), 4, math.sqrt(0.5), 4, 4, 0]
    assert group_std(differences, GROUP).tolist() == pytest.approx(std)
    assert normalised(values, GROUP, by_std=False).tolist() == differences.tolist()
    scaled = [d / (s + 1e-6) for d, s in zip(differences, std, strict=True)]
    assert normalised(values, GROUP, by_std=True).tolist() == pytest.approx(scaled)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.7, 1e30, 1e-30])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_what_is_equal_deviates_by_exactly_zero(value, size):
    # 0.1 + 0.1 + 0.1 is not 3 * 0.1.
    values = np.full(size, value)
    assert deviations(values, np.zeros(size, np.int64)).tolist() == [0.0] * size
    assert normalised(values, np.zeros(size, np.int64), by_std=True).tolist() == [0.0] * size
    assert whiten(values, np.ones(size, bool)).tolist() == [0.0] * size


def test_whiten_by_hand():
    # 1, 2 and 6: mean 3, squared deviations 4, 1 and 9, over 2: 7. What the mask leaves out is not looked at.
    got = whiten(np.array([1.0, np.nan, 2.0, 6.0, 1e9]), np.array([True, False, True, True, False]))
    assert got.tolist() == pytest.approx([x / math.sqrt(7 + 1e-8) for x in (-2, 0, -1, 3, 0)], rel=1e-12)
    # Where the numbers hardly differ 1e-8 tells: variance 2e-8, and 1 / sqrt(3e-8) instead of 1 / sqrt(2e-8).
    assert whiten(np.array([1e-4, -1e-4]), np.ones(2, bool)).tolist() == pytest.approx(
        [1 / math.sqrt(3), -1 / math.sqrt(3)]
    )
