r"""The rules of MATH, DAPO and Geometry3K on whole responses."""

from typing import Any

import pytest

from pipeline.reward.rules import math_boxed, math_dapo, rule_of
from pipeline.reward.rules.math_boxed import MAX_PRED

LONG = "Let us think. " * 7200  # 100 kB

BOXED = [
    (r"so $\boxed{42}$.", "42", 1), (r"\boxed{\$1,234.50}", "1234.5", 1), (r"\boxed{5\text{ cm}}", "5", 1),
    (r"\boxed{1,\!234}", "234, 1", 0), (r"\boxed{True}", "true", 1), (r"\boxed{False}", "true", 0),
    (r"\boxed{2012_7}", "2012_{7}", 1), (r"\boxed{2012_7}", "2012_5", 0), (r"\boxed{1} or \boxed{2}", "1,2", 0),
    (r"\boxed{1} or rather \boxed{2}", "2", 1), (r"\boxed{2} or rather \boxed{1}", "2", 0), (r"\boxed 5", "5", 1),
    (r"\fbox{5}", "5", 1), (r"\boxed{5} then \boxed{", "5", 1), (r"\boxed{5", "5", 0), (r"\boxed{}", "5", 0),
    ("The answer is 5.", "5", 0), ("", "5", 0), ("\u7b54\u6848 \\boxed{\u53f3}", "\u53f3", 1),
    (r"\boxed{\boxed{5}}", "5", 1), (r"\boxed{6\boxed{5}}", "5", 0), (r"\boxed{\boxed{6}5}", "5", 0),
    (r"\boxed 5 million", "5", 0), (r"\boxed 5 apples", "5", 1), (r"\boxed{5 million}", "5", 0),
    (r"\boxed{5, 6}", "5", 0), (r"\boxed{5 or 6}", "5", 0), (r"\boxed{\text{A}\text{B}}", "A", 0),
    (r"\boxed{0,005}", "5", 0), (r"\boxed{4.9999996+0}", "5", 0), (r"\boxed{f'(x)}", "f(x)", 0),
    ("\\boxed{\uff15}", "5", 0), (LONG + r"\boxed{5}" + LONG, "5", 1), (r"\boxed{" + LONG + "}", "5", 0),
    (r"\boxed{5" + "}" * 100_000, "5", 1),
]  # fmt: skip


@pytest.mark.parametrize(("response", "truth", "acc"), BOXED)
def test_boxed(response: str, truth: str, acc: int) -> None:
    result = rule_of("lighteval/MATH")(response, truth)
    assert (result["score"], result["acc"], result["undecided"]) == (float(acc), acc, 0)


@pytest.mark.parametrize(
    ("response", "truth", "pred"),
    [
        ("The answer is $\\frac12$.", "0.5", "\\frac12"), ("The answer is **42**", "42", "42"),
        ("Answer: 3.5 meters. Done", "3.5", "3.5 meters"), ("The answer is 1. No, the answer is 2", "2", "2"),
        ("The answers are 1 and 2.", "1,2", "1 and 2"),
    ],
)  # fmt: skip
def test_a_phrase_counts_where_the_rule_allows_it_and_there_is_no_box(response: str, truth: str, pred: str) -> None:
    right = {"score": 1.0, "acc": 1, "format": 0, "pred": pred, "undecided": 0}
    assert rule_of("numina_cn_k12")(response, truth) == right
    assert rule_of("numina_cn_k12")(f"\\boxed{{7}}. {response}", truth)["acc"] == 0
    assert rule_of("lighteval/MATH")(response, truth)["acc"] == 0


DAPO = [
    ("Answer: 34", 1), ("answer :34", 1), ("**Answer:** $34$", 1), ("Answer:\n34", 1), ("Answer: $\\boxed{34}$.", 1),
    ("Answer: 34" + "\nI am sure." * 100, 1), ("Answer: 1\nAnswer: 34", 1), ("Answer: 34\nAnswer: 1", 0),
    ("Answer: -34", 0), ("Answer: 34 degrees", 1), ("Answer: 34 dollars", 1), ("Answer: 34 points", 1),
    ("Answer: 34 million", 0), ("Answer: \\$34", 1), ("Answer: \\frac{68}{2}", 1), ("Answer: 34 or 35", 0),
    ("Answer:", 0), ("\\boxed{34}", 1), ("Answer: 1 \\boxed{34", 0), ("It is 34.", 0), ("Answer: \uff13\uff14", 0),
    ("Answer: $x = \\boxed{34}$.", 1), ("Answer: \\boxed{34} or 35", 0), ("Answer: 35, or \\boxed{34}", 0),
    ("Answer: -\\boxed{34}", 0), ("Answer: \\boxed{35} \\boxed{34}", 0), ("Answer: \\boxed{34} million", 0),
    ("Answer: \\boxed{34}^2", 0), ("Answer: 34 vs 35", 0), ("Answer: 34k", 0), ("Answer: 34 and a half", 0),
    ("Answer: 34 point two", 0), ("Answer: 34!", 0), ("Answer: 34\u00b2", 0), (LONG + "Answer: 34\n" + LONG, 1),
    ("Answer: " + LONG.replace(" ", ""), 0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "acc"), DAPO)
def test_dapo(response: str, acc: int) -> None:
    result = rule_of("math_dapo")(response, "34")
    assert (result["score"], result["acc"]) == (1.0 if acc else -1.0, acc)


def test_parts() -> None:
    wrong = {"score": 0.0, "acc": 0, "format": 1, "pred": "7", "undecided": 0}
    assert math_boxed.compute_score(r"\boxed{ 7 }", "42") == wrong
    assert math_boxed.compute_score("7", "42") == wrong | {"format": 0, "pred": ""}
    assert len(math_boxed.compute_score(r"\boxed{" + "7" * 1000 + "}", "42")["pred"]) == MAX_PRED
    assert math_dapo.compute_score("Answer: 7", "34") == wrong | {"score": -1.0}
    assert math_dapo.compute_score("\\boxed{34}", "34") == wrong | {"score": 1.0, "acc": 1, "format": 0, "pred": "34"}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>hm</think> \\boxed{5}", 1.0), ("<think>hm</think> \\boxed{6}", 0.1), ("\\boxed{5}", 0.9),
        ("<think>\\boxed{5}</think>", 0.9), ("hm <think>hm</think> \\boxed{5}", 0.9),
        ("<think>hm</think> \\boxed{5", 0.0), ("<think>hm</think> 5", 0.0),
    ],
)  # fmt: skip
def test_geometry3k(response: str, score: float) -> None:
    assert rule_of("hiyouga/geometry3k")(response, "5")["score"] == pytest.approx(score)


@pytest.mark.parametrize("truth", ["42", " 42 ", "$42$", 42, 42.0, r"\boxed{42}", r"so it is $\boxed{42}$."])
def test_ground_truth_is_an_answer_or_a_solution(truth: Any) -> None:
    for source in ("lighteval/MATH", "math_dapo", "hiyouga/geometry3k"):
        assert rule_of(source)(r"\boxed{42}", truth)["acc"] == 1
        assert rule_of(source)(r"\boxed{41}", truth)["acc"] == 0


@pytest.mark.parametrize("truth", [None, "", " ", "$$", r"\boxed{}", True, [42], {}, float("nan"), "4" * 2001])
@pytest.mark.parametrize(("source", "kind"), [("lighteval/MATH", "math"), ("math_dapo", "math_dapo")])
def test_unusable_ground_truth_is_an_error(source: str, kind: str, truth: Any) -> None:
    with pytest.raises(ValueError, match=rf"reward_model\.ground_truth of a {kind} row must be the answer"):
        rule_of(source)(r"\boxed{}", truth)
