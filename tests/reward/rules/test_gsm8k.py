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
    if commas:
        whole, dot, fraction = text.partition(".")
        text = grouped((whole.lstrip("0") or "0") + dot + fraction)  # a group that begins with 0 is none
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
        ("#### 42, as I found in 3 ways", 0, 0), ("#### 42 apples and 3 pears", 0, 0), ("It is 3/42", 0, 0),
        ("It is 2^{42}", 0, 0),
        ("#### 42\u0664", 0, 0), ("#### 42.\uff14", 0, 0), ("It is 42, or \u096a", 0, 0),
        ("It is 7e42", 0, 0), (r"It is \frac{3}{42}", 0, 0), ("It is 41 or 42", 0, 0),
    ("41 vs. 42", 0, 0), ("#### between 41 and 42", 0, 0),
    ("It is between $41 and $42.", 0, 0), ("He has 41 and she has 42", 0, 1), ("For 2 or more: 42", 0, 1),
    ("The answer is 42.", 0, 1),
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


UNUSABLE: list[Any] = [
    None,
    "",
    "x",
    "--7",
    "0,005",
    "7 million",
    "7k",
    "1_000",
    "1 000",
    "\u00bd",
    "7\u00b2",
    "12 apples",
    "#### 12",
    "1,00",
    "1.2.3",
    "\u0664",
    "1e3",
    True,
    math.nan,
    math.inf,
    [7],
    {},
]


@pytest.mark.parametrize("truth", UNUSABLE)
def test_malformed_ground_truth_is_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"reward_model\.ground_truth of a gsm8k row"):
        compute_score("#### 7", truth)


WHOLE = [
    # what stands behind the number
    "42 million", "42 thousand", "42 hundred", "42 dozen", "42-thousand", "42k", "42K", "42 k", "42M", "42 bn",
    "42mil", "42 and a half", "42 and one third", "42 half", "42 point three", "42 squared", "42 factorial",
    "42\u00b2", "42\u207b\u00b9", "42^2", "42^x", "42\u00bd", "42\u2153", "42\u4e07", "42\u0663", "42\uff13", "42x",
    "42e", "42xyz", "42 pi", "42i", "42_000", "42'000", "42,5", "4,20", "0,042", "042,000", "42.4.2", "42e3", "42E+3",
    "0x42", "1_042", "1'042", "1,0042",
]  # fmt: skip
LINES = [
    "42 vs 43", "42 vs. forty-three", "42 or 43", "42 or so", "42 or forty-three", "42 43", "4 2", "42\u00a0000",
    "42 1/2", "42/2", "42 / 2", "42-43", "42 to 43", "42 apples or 43 pears", "42, 43", "42; 43", "42, maybe 43",
    "42 (or 43)", "42 = 43", "42 = x", "42 + x", "42\u00d7x", "42\\times x", "42\\frac12", "42 plus tax",
    "42 minus two", "42!", "42 !", "42 over 7", "42 divided by two", "42 times two", "42 \u00b1 1", "42 ~ 43",
    "42 apples, or a hundred", "42:30", "42 \u2460", "--42", "-+42", "+-42", "- -42", "-$-42", "\u2212-42", ",42",
    "..42", "42 doubled makes eighty-four",
]  # fmt: skip


@pytest.mark.parametrize("answer", WHOLE + LINES)
def test_what_is_more_than_a_number_is_wrong_as_a_whole(answer: str) -> None:
    for response in (f"#### {answer}", f"6 * 7 = 42\n#### {answer}", f"#### {answer}\nSo it is."):
        for truth in ("42", "-42", "5", "43", "0", "2"):
            assert [compute_score(response, truth, method)["acc"] for method in METHODS] == [0, 0], response
    if answer in WHOLE:
        for response in (f"So the answer is {answer}.", f"It is {answer}", f"**{answer}**"):
            assert compute_score(response, "42")["acc"] == 0, response


RIGHT = [
    "42 apples", "42 dollars", "42%", "42 %", "42 percent", "$42", "$ 42", "\\$42", "42$", "\u20ac42", "\u00a342",
    "42\u20ac", "42\u00b0", "42^\\circ", "42.", "42..", "42...", "42.00", "042", "+42", "42cm", "42 cm^2",
    "42 cm\u00b2", "42m\u00b2", "42 ft^{3}", "42 km/h", "42mph", "42am", "42nd", "42 p.m.", "42 miles per hour",
    "42 T-shirts", "42 M&Ms", "42 points", "42 seconds", "42 quarters", "42-year-old", "42 more than Tom", "42</s>",
    "42<|im_end|>", "42 (apples)", "42\\text{ apples}", "42\\%", "42**", "42`", "42 \u5143", "42\u4e2a\u82f9\u679c",
    "42 (forty-two)", "42 third graders", "42, I think", "42 apples!", "42 is the answer", "42\r", "42\t",
]  # fmt: skip


@pytest.mark.parametrize("answer", RIGHT)
def test_a_unit_or_a_remark_behind_the_number_leaves_it_right(answer: str) -> None:
    for method in METHODS:
        assert compute_score(f"6 * 7 = 43\n#### {answer}", "42", method)["acc"] == 1
        assert compute_score(f"#### {answer}", "-42", method)["acc"] == 0
    assert compute_score(f"6 * 7 = 43. The answer is {answer}", "42")["acc"] == 1


NEGATIVE = [
    "-42",
    "- 42",
    "-$42",
    "$-42",
    "- $ 42",
    "-\\$42",
    "\u221242",
    "\u2212 42",
    "\u201342",
    "-42 dollars",
    "-42.0",
]


@pytest.mark.parametrize("answer", NEGATIVE)
def test_a_minus_behind_the_hashes_is_a_sign(answer: str) -> None:
    for method in METHODS:
        assert compute_score(f"#### {answer}", "-42", method)["acc"] == 1
        assert compute_score(f"#### {answer}", "42", method)["acc"] == 0


@pytest.mark.parametrize(
    "said", ["It is minus 42", "It is negative 42.", "= - 42", "it is \u201342", "#### minus 42", "= -$42"]
)
def test_a_minus_in_running_text(said: str) -> None:
    assert compute_score(said, "-42")["acc"] == 1 and compute_score(said, "42")["acc"] == 0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("0,005", 5),
        ("0,005", 0.005),
        ("1 000", 0),
        ("1 000", 1),
        ("\u221a4", 4),
        ("\u00bd", 2),
        ("4\u00bd", 4),
        ("infinity", 0),
        ("nan", 0),
        ("00,123", 123),
    ],
)
def test_no_other_number_is_read(answer: str, truth: float) -> None:
    assert compute_score(f"#### {answer}", truth)["acc"] == compute_score(f"It is {answer}.", truth)["acc"] == 0


@pytest.mark.parametrize(
    "said", ["x_42", "x42", "f(42)", "log 42", "ln(42)", "7\u00f742", "7\u204442", "7\u221542", "7:42"]
)
def test_the_last_number_is_no_part_of_a_formula(said: str) -> None:
    assert compute_score(f"So it is {said}.", "42")["acc"] == 0


@pytest.mark.parametrize("said", ["1{,}234", "1,\\!234", "1\\!234", "$1{,}234$"])
def test_thousands_as_latex_has_them(said: str) -> None:
    assert compute_score(f"So it is {said}.", "1234")["acc"] == compute_score(f"#### {said}", "1234")["acc"] == 1
    assert compute_score(f"So it is {said}.", "234")["acc"] == 0


def test_unknown_method_is_an_error() -> None:
    with pytest.raises(ValueError, match="method is 'lax', but must be one of strict, flexible"):
        gsm8k.compute_score("#### 7", "7", "lax")  # type: ignore[arg-type]
