"""The Geometry3K rule: nine tenths for the answer, one for the form."""

import pytest

from pipeline.reward.rules import rule_of
from tests.reward.rules.cheap import LIMIT, seconds

CASES = [
    ("<think>hm</think> \\boxed{5}", 1.0),
    ("<think>hm</think> \\boxed{6}", 0.1),
    ("\\boxed{5}", 0.9),
    ("<think>\\boxed{5}</think>", 0.9),
    ("hm <think>hm</think> \\boxed{5}", 0.9),
    ("<think>hm</think> \\boxed{5.0\\text{ cm}}", 1.0),
    ("<think>hm</think> \\boxed{5", 0.0),
    ("<think>hm</think> 5", 0.0),
    ("", 0.0),
    ("<think>" + "hm " * 33_000 + "</think> \\boxed{5}", 1.0),
    ("<think>" * 14_000 + "\\boxed{" * 14_000, 0.0),
]


@pytest.mark.parametrize(("response", "score"), CASES)
def test_cases(response: str, score: float) -> None:
    rule = rule_of("hiyouga/geometry3k")
    assert rule(response, "5")["score"] == pytest.approx(score)  # type: ignore[index]
    assert seconds(rule, response, "5") < LIMIT
