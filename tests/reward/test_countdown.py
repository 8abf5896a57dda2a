"""The Countdown rule: exact arithmetic against random trees, and answers meant to hurt."""

import time
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeline.reward.rules import countdown
from pipeline.reward.rules.countdown import AnswerError, compute_score, evaluate, extract_answer, tokenize

TRUTH = {"target": 54, "numbers": [3, 7, 25]}


@dataclass(frozen=True)
class Tree:
    """An expression whose text, value and numbers come from the tree itself, not from the parser under test."""

    text: str
    value: Fraction | None  # None: divides by zero
    numbers: tuple[int, ...]


def _combined(operator: str, left: Tree, right: Tree, blank: str) -> Tree:
    value = None
    if left.value is not None and right.value is not None and not (operator == "/" and right.value == 0):
        a, b = left.value, right.value
        value = {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[operator]()
    text = f"({left.text}){blank}{operator}{blank}({right.text})"
    return Tree(text, value, left.numbers + right.numbers)


def _negated(tree: Tree) -> Tree:
    return Tree(f"-({tree.text})", None if tree.value is None else -tree.value, tree.numbers)


leaves = st.integers(0, 10**18 - 1).map(lambda n: Tree(str(n), Fraction(n), (n,)))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(_combined, st.sampled_from("+-*/"), inner, inner, st.sampled_from(["", " ", "\n\t"])),
        inner.map(_negated),
    ),
    max_leaves=8,
)


@given(trees)
def test_value_is_that_of_the_tree(tree: Tree) -> None:
    if tree.value is None:
        with pytest.raises(ZeroDivisionError):
            evaluate(tokenize(tree.text))
    else:
        assert evaluate(tokenize(tree.text)) == tree.value


@given(st.lists(st.tuples(st.sampled_from("+-*/"), st.integers(1, 99)), max_size=12), st.integers(1, 99))
def test_precedence_and_left_association(tail: list[tuple[str, int]], first: int) -> None:
    # Sum of products, folded by hand: no brackets, so only the grammar decides what binds first.
    products = [Fraction(first)]
    for operator, number in tail:
        if operator in "+-":
            products.append(Fraction(number if operator == "+" else -number))
        else:
            products[-1] = products[-1] * number if operator == "*" else products[-1] / number
    text = str(first) + "".join(f"{operator}{number}" for operator, number in tail)
    assert evaluate(tokenize(text)) == sum(products)


@given(trees, st.integers(-3, 3))
def test_score_of_a_tree(tree: Tree, error: int) -> None:
    assume(tree.value is not None and tree.value.denominator == 1 and len(tree.text) <= countdown.MAX_LENGTH)
    truth = {"target": int(tree.value) + error, "numbers": sorted(tree.numbers)}
    assert compute_score(f"<answer>{tree.text}</answer>", truth)["score"] == (1.0 if error == 0 else 0.1)
    truth["target"] -= error
    truth["numbers"] = [*truth["numbers"], 1]
    assert compute_score(f"<answer>{tree.text}</answer>", truth)["score"] == 0.1


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think> 25 - 7 = 18 </think>\n<answer> (25 - 7) * 3 </answer>", 1.0),
        ("<answer>3*(25-7)</answer><|im_end|>", 1.0),
        ("<answer>-(7-25)*3</answer>", 1.0),
        ("<answer>1</answer> no, <answer>(25-7)*3</answer>", 1.0),
        ("<answer>(25-7)*3</answer> and <answer>unfinished", 1.0),
        ("<answer><answer>(25-7)*3</answer></answer>", 1.0),
        ("<answer>(25-7)*3</answer> no, <answer>1</answer>", 0.1),
        ("<answer></answer>", 0.1),
        ("<answer>54</answer>", 0.1),
        ("<answer>(25-7)*3+3-3</answer>", 0.1),
        ("<answer>(25-7)*3 = 54</answer>", 0.1),
        ("<answer>(25-7)×3</answer>", 0.1),
        ("<answer>(25-7)*3.0</answer>", 0.1),
        ("<answer>(25-7)*03</answer>", 0.1),
        ("<answer>(25-7)(3)</answer>", 0.1),
        ("<answer>+(25-7)*3</answer>", 0.1),
        ("<answer>(25-7)*3</answer", 0.0),
        ("(25-7)*3</answer>", 0.0),
        ("</answer>(25-7)*3<answer>", 0.0),
        ("<Answer>(25-7)*3</Answer>", 0.0),
        ("", 0.0),
    ],
)
def test_cases(response: str, score: float) -> None:
    result = compute_score(response, TRUTH)
    assert result["score"] == score
    assert (result["acc"], result["format"]) == (int(score == 1.0), int(score > 0))


def test_division_is_exact() -> None:
    assert compute_score("<answer>1/3*9</answer>", {"target": 3, "numbers": [1, 3, 9]})["score"] == 1.0
    near = {"target": 1, "numbers": [10**9, 10**9 + 1]}
    assert compute_score(f"<answer>{10**9}/{10**9 + 1}</answer>", near)["score"] == 0.1


def test_each_number_as_often_as_given() -> None:
    truth = {"target": 9, "numbers": [3, 3]}
    assert compute_score("<answer>3*3</answer>", truth)["score"] == 1.0
    assert compute_score("<answer>3*3</answer>", {"target": 9, "numbers": [3]})["score"] == 0.1
    assert compute_score("<answer>3+3+3</answer>", truth)["score"] == 0.1


def test_pred_is_the_answer_without_blanks() -> None:
    assert compute_score("<answer> (25 - 7)\n* 3 </answer>", TRUTH)["pred"] == "(25-7)*3"
    assert compute_score("no answer", TRUTH)["pred"] == ""


MEGA = 1_000_000
HOSTILE = {
    "deep brackets": "<answer>" + "(" * MEGA + "3" + ")" * MEGA + "</answer>",
    "brackets within the length": "<answer>" + "(" * 498 + "3" + ")" * 498 + "</answer>",
    "brackets around the right answer": "<answer>" + "(" * 400 + "(25-7)*3" + ")" * 400 + "</answer>",
    "signs within the length": "<answer>" + "-" * 900 + "3*(25-7)</answer>",
    "powers": "<answer>9**9**9</answer>",
    "long number": "<answer>" + "9" * MEGA + "</answer>",
    "long number within the length": "<answer>" + "9" * 900 + "</answer>",
    "long product": "<answer>" + "9*" * MEGA + "9</answer>",
    "arabic digits": "<answer>(٢٥-٧)*٣</answer>",
    "fullwidth digits": "<answer>(\uff12\uff15-7)*3</answer>",
    "superscript": "<answer>(25-7)*3¹</answer>",
    "a thousand answers": "<answer>1+1</answer>" * 1000,
    "thousands of open answers": "<answer>" * 100_000 + "1</answer>",
    "thousands of closing tags": "<answer>" + "</answer>" * 100_000,
    "blanks": "<answer>" + " " * MEGA + "</answer>",
    "nul": "<answer>\0(25-7)*3</answer>",
    "surrogate": "<answer>\ud800(25-7)*3</answer>",
    "zero division": "<answer>3/(7-7)*25</answer>",
    "zero division of the given numbers": "<answer>25/(7-7)</answer>",
    "call": "<answer>__import__('os').system('true')</answer>",
    "unicode blank": "<answer>(25\u00a0-\u20037)*3</answer>",
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1" * 19, "over 18 digits"),
        ("00", "leading zero"),
        ("1" + " " * 1000, "more than 1000"),
        ("1+!", "'!' at character 2"),
    ],
)
def test_bounds_of_the_tokenizer(text: str, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        tokenize(text)


def test_depth_is_bounded_before_the_stack_is() -> None:
    for opening, closing in (("(", ")"), ("-", "")):
        inside = opening * countdown.MAX_DEPTH + "7" + closing * countdown.MAX_DEPTH
        assert evaluate(tokenize(inside)) == 7
        with pytest.raises(AnswerError, match="nests deeper than 50"):
            evaluate(tokenize(f"{opening}{inside}{closing}"))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_are_wrong_and_cheap(name: str) -> None:
    truth = {"target": 54, "numbers": [7, 7, 25]} if "given" in name else TRUTH
    start = time.perf_counter()
    score = compute_score(HOSTILE[name], truth)["score"]
    seconds = time.perf_counter() - start
    assert score == 0.1
    assert seconds < 0.05


@pytest.mark.parametrize("text", ["x" * 10 * MEGA, "</answer>" * MEGA, "<answer" * MEGA, "<answer>" * MEGA])
def test_long_responses_without_an_answer_are_cheap(text: str) -> None:
    start = time.perf_counter()
    assert compute_score(text, TRUTH)["score"] == 0.0
    assert time.perf_counter() - start < 0.25


@given(st.text(alphabet=st.characters(), max_size=60), st.text(max_size=60))
def test_no_text_raises(inside: str, around: str) -> None:
    assert compute_score(f"{around}<answer>{inside}</answer>", TRUTH)["score"] in (0.1, 1.0)
    assert compute_score(inside, TRUTH)["score"] in (0.0, 0.1, 1.0)


@given(st.text(alphabet="0123456789+-*/() ", max_size=40))
def test_no_expression_raises_anything_else(text: str) -> None:
    with suppress(AnswerError, ZeroDivisionError):
        assert isinstance(evaluate(tokenize(text)), Fraction)


@given(st.text(alphabet="</answer>x", max_size=60))
def test_extracted_answer_holds_no_tag(text: str) -> None:
    answer = extract_answer(f"<answer>1</answer>{text}")
    assert answer is not None and "<answer>" not in answer and "</answer>" not in answer


@pytest.mark.parametrize(
    "truth",
    [
        None,
        "54",
        {},
        {"target": 54},
        {"numbers": [3]},
        {"target": "54", "numbers": [3]},
        {"target": True, "numbers": [3]},
        {"target": 54.5, "numbers": [3]},
        {"target": 54, "numbers": []},
        {"target": 54, "numbers": "3 7"},
        {"target": 54, "numbers": [3, None]},
        {"target": 54, "numbers": [3, -7]},
    ],
)
def test_malformed_ground_truth_is_an_error(truth: object) -> None:
    with pytest.raises(ValueError, match=r"reward_model\.ground_truth"):
        compute_score("<answer>3</answer>", truth)  # type: ignore[arg-type]
