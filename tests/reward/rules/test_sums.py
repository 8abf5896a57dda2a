"""The rule for sums: the last number counts, and a response of only the number is in the requested form."""

import pytest

from pipeline.reward.rules import RULES
from pipeline.reward.rules.sums import compute_score


@pytest.mark.parametrize(
    ("response", "right", "only"),
    [
        ("42", 1, 1),
        (" 42\n", 1, 1),
        ("17 + 25 = 42", 1, 0),
        ("The answer is 42.", 1, 0),
        ("42 or 43", 0, 0),
        ("41", 0, 1),
        ("17 + 25", 0, 0),
        ("", 0, 0),
        ("forty-two", 0, 0),
    ],
)
def test_scores(response: str, right: int, only: int) -> None:
    for truth in ("42", 42):
        scored = compute_score(response, truth)
        assert (scored["score"], scored["acc"], scored["format"]) == (right, right, only)
    assert RULES["sums"] is compute_score


def test_a_truth_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="must be a number"):
        compute_score("42", "many")
