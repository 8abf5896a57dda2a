"""No rule takes 50 ms for a response of 100 kB, whatever it holds, and none raises for it."""

from typing import Any

import pytest

from pipeline.reward.rules import RULES
from tests.reward.rules.cheap import LIMIT, seconds

KB100 = 100_000
RESPONSES = {
    name: (text * (KB100 // len(text) + 1))[:KB100]
    for name, text in {
        "words": "Let us think about it. ",
        "blanks": " ",
        "lines": "\n",
        "digits": "7",
        "numbers": "7 ",
        "grouped numbers": "777,",
        "decimals": "7.",
        "dots": ".",
        "hashes": "#",
        "marks": "#### ",
        "marked numbers": "#### 7\n",
        "open braces": "{",
        "braces": "{}",
        "brackets": "(",
        "backslashes": "\\",
        "open boxes": "\\boxed{",
        "boxes": "\\boxed{7}",
        "bare boxes": "\\boxed 7 ",
        "boxes without braces": "\\boxed ",
        "fractions": "\\frac{1}{2}",
        "open answers": "<answer>",
        "closed answers": "</answer>",
        "answers": "<answer>7</answer>",
        "thoughts": "<think></think>",
        "answer lines": "Answer: 7\n",
        "answer words": "answer is ",
        "answer colons": "answer:",
        "answers and blanks": "answer        ",
        "dollars": "$",
        "signs": "+-*/",
        "powers": "9^",
        "python": "().__class__",
        "format": "%s{0}",
        "nul": "\0",
        "arabic digits": "\u0667",
        "combining marks": "a\u0301",
        "surrogates": "\ud800",
        "right to left": "\u202e7",
    }.items()
}
TRUTHS: dict[str, Any] = {"countdown": {"target": 9, "numbers": [4, 5]}, "searchR1_*": {"target": ["ninety"]}}


@pytest.mark.parametrize("source", RULES)
@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_of_100_kb(source: str, name: str) -> None:
    rule, truth = RULES[source], TRUTHS.get(source, 1)
    result = rule(RESPONSES[name], truth)
    assert isinstance(result, dict) and result["acc"] == 0
    assert seconds(rule, RESPONSES[name], truth) < LIMIT
