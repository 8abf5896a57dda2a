"""The MATH rule on whole responses."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.reward.rules import rule_of
from pipeline.reward.rules.math_boxed import MAX_PRED, after_phrase, compute_score
from tests.reward.rules.cheap import LIMIT, seconds

LONG = "Let us think. " * 7200  # 100 kB

CASES = [
    (r"so $\boxed{42}$.", "42", 1),
    (r"\boxed{-42}", "-42", 1),
    (r"\boxed{42}", "-42", 0),
    (r"\boxed{1,234}", "1234", 1),
    (r"\boxed{\$1,234.50}", "1234.5", 1),
    (r"\boxed{5\text{ cm}}", "5", 1),
    (r"\boxed{50\%}", "50", 1),
    (r"\boxed{\frac{1}{2}}", "0.5", 1),
    (r"\boxed{2\frac34}", r"\frac{11}{4}", 1),
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}", 1),
    (r"\boxed{\left\{1,\frac{1}{\sqrt{2}}\right\}}", r"\{\frac{\sqrt2}{2},1\}", 1),
    (r"\boxed{1} or \boxed{2}", "1,2", 0),
    (r"\boxed{1} or rather \boxed{2}", "2", 1),
    (r"\boxed{2} or rather \boxed{1}", "2", 0),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1),
    (r"\boxed{x=5}", "5", 1),
    (r"\boxed 5", "5", 1),
    (r"\fbox{5}", "5", 1),
    (r"\boxed{5} then \boxed{", "5", 1),
    (r"\boxed{5", "5", 0),
    (r"\boxed{}", "5", 0),
    ("The answer is 5.", "5", 0),
    ("5", "5", 0),
    ("", "5", 0),
    ("\u7b54\u6848 \\boxed{\u53f3}", "\u53f3", 1),
    ("\\boxed{\uff15}", "5", 0),
    (LONG + r"\boxed{5}", "5", 1),
    (r"\boxed{5}" + LONG, "5", 1),
    (LONG, "5", 0),
    (r"\boxed{" + LONG + "}", "5", 0),
    (r"\boxed{" * 14_000, "5", 0),
    (r"\boxed{5" + "}" * 100_000, "5", 1),
    ("\\boxed{9^{9^{9}}}", "5", 0),
    ("{" * 100_000, "5", 0),
]


@pytest.mark.parametrize(("response", "truth", "acc"), CASES)
def test_cases(response: str, truth: str, acc: int) -> None:
    result = compute_score(response, truth)
    assert (result["score"], result["acc"]) == (float(acc), acc)
    assert seconds(compute_score, response, truth) < LIMIT
    assert seconds(rule_of("numina_olympiads"), response, truth) < LIMIT


def test_parts() -> None:
    assert compute_score(r"\boxed{ 7 }", "42") == {"score": 0.0, "acc": 0, "format": 1, "pred": "7"}
    assert compute_score("7", "42") == {"score": 0.0, "acc": 0, "format": 0, "pred": ""}
    assert len(compute_score(r"\boxed{" + "7" * 1000 + "}", "42")["pred"]) == MAX_PRED


@pytest.mark.parametrize("truth", ["42", " 42 ", "$42$", 42, 42.0, r"\boxed{42}", r"so it is $\boxed{42}$."])
def test_ground_truth_is_an_answer_or_a_solution(truth: Any) -> None:
    assert compute_score(r"\boxed{42}", truth)["acc"] == 1
    assert compute_score(r"\boxed{41}", truth)["acc"] == 0


@pytest.mark.parametrize("truth", [None, "", " ", "$$", r"\boxed{}", True, [42], {}, float("nan"), "4" * 2001])
def test_unusable_ground_truth_is_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"reward_model\.ground_truth of a math row must be the answer"):
        compute_score(r"\boxed{}", truth)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 42.", "42"),
        ("The answer is $42$.", "42"),
        ("The answer is **42**", "42"),
        ("Answer: 3.5 meters. Done", "3.5 meters"),
        ("The answer is 1. No, the answer is 2", "2"),
        ("The answers are 1 and 2.", "1 and 2"),
        ("The answer is\n5", None),
        ("42", None),
        ("answer is " * 10_000, None),
    ],
)
def test_phrases(text: str, answer: str | None) -> None:
    assert after_phrase(text) == answer


def test_a_phrase_counts_where_the_rule_allows_it_and_there_is_no_box() -> None:
    rule = rule_of("numina_cn_k12")
    assert rule("The answer is $\\frac12$.", "0.5") == {"score": 1.0, "acc": 1, "format": 0, "pred": "\\frac12"}
    assert rule("\\boxed{1}. The answer is 2.", "2")["acc"] == 0  # type: ignore[index]
    assert rule_of("lighteval/MATH")("The answer is 2.", "2")["acc"] == 0  # type: ignore[index]


@given(st.text(max_size=40) | st.text("\\boxed{}12 $", max_size=40))
def test_no_response_raises(response: str) -> None:
    assert compute_score(response, "5")["score"] in (0.0, 1.0)
