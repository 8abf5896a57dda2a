"""The rule for pictures of blocks: the response must be the answer."""

import pytest

from pipeline.reward.rules.blocks import compute_score


@pytest.mark.parametrize(
    ("response", "score", "pred"),
    [
        ("3", 1, "3"),
        (" 3\n", 1, "3"),
        ("33", 0, "33"),
        ("three", 0, "three"),
        ("", 0, ""),
        ("3 blocks, or is it 4?", 0, ""),
        ("3" * 10_000, 0, ""),
    ],
)
def test_numbers(response: str, score: float, pred: str) -> None:
    scored = compute_score(response, "3")
    assert scored == {"score": score, "acc": score, "format": float(bool(pred)), "pred": pred}


def test_upper_case_does_not_count() -> None:
    assert compute_score("Red", "red")["score"] == compute_score("red", "Red")["score"] == 1


@pytest.mark.parametrize("truth", [None, 3, "", "r" * 21, ["red"]])
def test_ground_truths_of_another_kind_are_errors(truth: object) -> None:
    with pytest.raises(ValueError, match="it must be an answer of at most 20 characters"):
        compute_score("red", truth)
