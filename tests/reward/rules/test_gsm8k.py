"""The GSM8K rule: numbers against `Decimal`, and ways to write an answer."""

import math
from decimal import Decimal
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.reward.rules import gsm8k
from pipeline.reward.rules.gsm8k import MAX_PRED, canonical, compute_score

METHODS: tuple[Literal["strict", "flexible"], ...] = ("strict", "flexible")

digits = st.text("0123456789", min_size=1, max_size=30)
numbers = st.builds(lambda whole, fraction: f"{whole}.{fraction}" if fraction else whole, digits, digits | st.just(""))


def grouped(number: str) -> str:
    """The number with commas between groups of three."""
    whole, dot, fraction = number.partition(".")
    first = len(whole) % 3
    parts = ([whole[:first]] if first else []) + [whole[i : i + 3] for i in range(first, len(whole), 3)]
    return ",".join(parts) + dot + fraction


@given(numbers, numbers, st.booleans(), st.booleans())
def test_canonical_forms_are_equal_exactly_if_the_numbers_are(a: str, b: str, minus_a: bool, minus_b: bool) -> None:
    values = [Decimal(f"-{text}" if minus else text) for text, minus in ((a, minus_a), (b, minus_b))]
    forms = [canonical(a, minus_a), canonical(b, minus_b)]
    assert (forms[0] == forms[1]) == (values[0] == values[1])
    assert [Decimal(form or "nan") for form in forms] == values


@given(numbers, st.booleans(), st.sampled_from(["", "$", "\\$"]), st.integers(0, 5), st.booleans(), st.booleans())
def test_every_way_to_write_a_number(
    number: str, minus: bool, money: str, zeros: int, commas: bool, sign_first: bool
) -> None:
    text = f"0.{'0' * zeros}" if not number.strip("0.") else number  # a zero has no sign to lose
    text = grouped(text) if commas else text
    text += "0" * zeros if "." in text else ("." + "0" * zeros if zeros else "")
    sign = "-" if minus else ""
    text = f"{sign}{money}{text}" if sign_first else f"{money}{sign}{text}"
    truth = f"{sign}{number}"
    for method in METHODS:
        for tail in ("", ".", " apples", "%", "\n", ", I think."):
            result = compute_score(f"3 + 4 = 7\n#### {text}{tail}", truth, method)
            assert result == {"score": 1.0, "acc": 1, "format": 1, "pred": canonical(number, minus)}
    for tail in ("", ".", " apples", "**", "}$", "!\n\nDone."):
        assert compute_score(f"3 + 4 = 7. The answer is {text}{tail}", truth)["acc"] == 1


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        ("6 * 7 = 42\n#### 42", 1, 1), ("####42", 1, 1), ("#### \t 42", 1, 1), ("##### 42", 1, 1),
        ("#### 42\nI checked it in 3 ways.", 1, 1), ("#### 42" + " and so on" * 1000, 1, 1), ("#### 7\n#### 42", 1, 1),
        ("#### 42\n#### done", 1, 1), ("#### \u221242", 0, 0), ("#### 42\n#### 7", 0, 0),
        ("#### 7\nNo, it is 42.", 0, 0), ("#### -42", 0, 0), ("#### 42.5", 0, 0), ("#### 4,2", 0, 0),
        ("#### 42,00", 0, 0), ("#### 42.0.0", 0, 0), ("#### 1e42", 0, 0), ("#### 42/4", 0, 0), ("#### 42 1/2", 0, 0),
        ("#### 42^2", 0, 0), ("#### 42e3", 0, 0), ("#### 42 * 2 = 84", 0, 0), ("#### 42-43", 0, 0),
        ("#### 42 or 43", 0, 0), ("#### 42, 43", 0, 0), ("#### 42x10^3", 0, 0),
        ("#### 42, as I found in 3 ways", 1, 1), ("#### 42 apples and 3 pears", 1, 1), ("It is 3/42", 0, 0),
        ("It is 2^{42}", 0, 0),
        ("#### 42\u0664", 0, 0), ("#### 42.\uff14", 0, 0), ("It is 42, or \u096a", 0, 0),
        ("It is 7e42", 0, 0), (r"It is \frac{3}{42}", 0, 0), ("The answer is 42.", 0, 1),
        ("The answer is...42", 0, 1), ("The answer is,42", 0, 1), ("The answer is 42" + " and so on" * 1000, 0, 1),
        (r"\boxed{42}", 0, 1), ("#### **42**", 0, 1), ("####\n42", 0, 1), ("### 42", 0, 1), ("#### \\boxed{42}", 0, 1),
        ("It lies in 40-42", 0, 1), ("It is x-42", 0, 1), ("It is (50)-42", 0, 1), ("that is--42", 0, 1),
        ("It is -42", 0, 0), ("= -$42", 0, 0), ("= $-42", 0, 0), ("= \u221242", 0, 0), ("42 of 43", 0, 0),
        ("42, not 4,3", 0, 0), ("no number", 0, 0), ("", 0, 0), ("...", 0, 0), ("####", 0, 0),
    ],
)  # fmt: skip
def test_cases(response: str, strict: int, flexible: int) -> None:
    for method, acc in zip(METHODS, (strict, flexible), strict=True):
        result = compute_score(response, "42", method)
        assert (result["acc"], result["score"]) == (acc, float(acc))


@pytest.mark.parametrize(
    ("response", "format", "pred"),
    [
        ("#### $-1,007.50 in all", 1, "-1007.5"), ("it is 7", 0, "7"), ("it is 3,4", 0, "3,4"),
        ("it is -.50", 0, "-0.5"), ("it is -0.0", 0, "0"), ("nothing", 0, ""),
        ("9" * (MAX_PRED + 1), 0, "9" * MAX_PRED),
    ],
)  # fmt: skip
def test_parts(response: str, format: int, pred: str) -> None:
    assert compute_score(response, "42") == {"score": 0.0, "acc": 0, "format": format, "pred": pred}


@pytest.mark.parametrize(
    ("truth", "text"),
    [
        ("1000", "1,000"), (" $1,000.00 ", "1,000"), ("1000.", "1000"), (1e3, "1000"), ("+1000", "1000"),
        (-7.5, "-7.5"), ("-$7", "-7"), ("\u22127", "-7"), (0.1, ".1"), (10**400, f"1{'0' * 400}"),
    ],
)  # fmt: skip
def test_ground_truth_is_text_or_a_number(truth: str | int | float, text: str) -> None:
    assert compute_score(f"#### {text}", truth)["score"] == 1.0
    assert compute_score(f"#### {text}1", truth)["score"] == 0.0


UNUSABLE = [None, "", "x", "12 apples", "#### 12", "1,00", "1.2.3", "\u0664", "1e3", True, math.nan, math.inf, [7], {}]


@pytest.mark.parametrize("truth", UNUSABLE)
def test_malformed_ground_truth_is_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"reward_model\.ground_truth of a gsm8k row"):
        compute_score("#### 7", truth)


def test_unknown_method_is_an_error() -> None:
    with pytest.raises(ValueError, match="method is 'lax', but must be one of strict, flexible"):
        gsm8k.compute_score("#### 7", "7", "lax")  # type: ignore[arg-type]
