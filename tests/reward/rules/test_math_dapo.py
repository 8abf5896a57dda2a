"""The rule of DAPO and AIME on whole responses."""

import pytest

from pipeline.reward.rules import rule_of
from pipeline.reward.rules.math_dapo import answer_line, compute_score
from tests.reward.rules.cheap import LIMIT, seconds

LONG = "Let us think. " * 7200  # 100 kB

CASES = [
    ("Answer: 34", "34", 1),
    ("Answer:34", "34", 1),
    ("answer : 34", "34", 1),
    ("ANSWER: $34$", "34", 1),
    ("**Answer:** 34", "34", 1),
    ("**Answer**: 34", "34", 1),
    ("Answer:\n34", "34", 1),
    ("Answer: \\boxed{34}", "34", 1),
    ("Answer: $\\boxed{34}$.", "34", 1),
    ("Answer: 34" + "\nI am sure." * 100, "34", 1),
    ("Answer: 1\nAnswer: 34", "34", 1),
    ("Answer: 34\nAnswer: 1", "34", 0),
    ("Answer: -34", "34", 0),
    ("Answer: -34", "-34", 1),
    ("Answer: 1,034", "1034", 1),
    ("Answer: \\$34", "34", 1),
    ("Answer: 34 degrees", "34", 1),
    ("Answer: 34\\%", "34", 1),
    ("Answer: $\\frac{1}{2}$", "0.5", 1),
    ("Answer: 1\\frac12", "3/2", 1),
    ("Answer: \\frac{\\sqrt{3}}{2}", "\\frac{\\sqrt3}{2}", 1),
    ("Answer: 34 or 35", "34", 0),
    ("Answer: none", "34", 0),
    ("Answer:", "34", 0),
    ("\\boxed{34}", "34", 1),
    ("\\boxed{34}" + LONG, "34", 1),
    ("Answer: 1 \\boxed{34", "34", 0),
    ("It is 34.", "34", 0),
    ("", "34", 0),
    ("Answer: \uff13\uff14", "34", 0),
    ("\u7b54\u6848 Answer: 34", "34", 1),
    (LONG + "Answer: 34", "34", 1),
    ("Answer: 34\n" + LONG, "34", 1),
    ("Answer: " + LONG.replace(" ", ""), "34", 0),
    ("Answer" * 16_000, "34", 0),
    ("Answer:" * 14_000, "34", 0),
    ("Answer" + " " * 100_000 + ": 34", "34", 0),
    ("Answer: 9^{9^{9}}", "34", 0),
    ("Answer: " + "{" * 100_000, "34", 0),
    ("Answer: " + "\\boxed{" * 14_000, "34", 0),
]


@pytest.mark.parametrize(("response", "truth", "acc"), CASES)
def test_cases(response: str, truth: str, acc: int) -> None:
    result = compute_score(response, truth)
    assert (result["score"], result["acc"]) == (1.0 if acc else -1.0, acc)
    assert seconds(compute_score, response, truth) < LIMIT


def test_parts() -> None:
    assert compute_score("Answer: 7", "34") == {"score": -1.0, "acc": 0, "format": 1, "pred": "7"}
    assert compute_score("\\boxed{34}", "34") == {"score": 1.0, "acc": 1, "format": 0, "pred": "34"}
    assert compute_score("34", 34) == {"score": -1.0, "acc": 0, "format": 0, "pred": ""}


def test_lines() -> None:
    assert answer_line("Answer: a \nAnswer: *b*\n") == "b"
    assert answer_line("no") is None


@pytest.mark.parametrize("source", ["math", "math_dapo", "math_dapo_reasoning", "aime2024", "aime_2025"])
def test_data_sources(source: str) -> None:
    assert rule_of(source)("Answer: 34", "034")["score"] == 1.0  # type: ignore[index]


def test_unusable_ground_truth_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"ground_truth of a math_dapo row must be the answer"):
        compute_score("Answer: 1", "")
